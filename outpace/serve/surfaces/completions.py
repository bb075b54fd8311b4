"""/v1/completions: from its fields to a job, and from answers to its replies."""

from __future__ import annotations

from typing import Any

from outpace.api.request import Request
from outpace.sampling.logprobs import Logprob
from outpace.serve.jobs.job import Delta, Job, JobOutcome
from outpace.serve.jobs.run import JobRun
from outpace.serve.served import Served
from outpace.serve.surfaces.completion_fields import USUAL_TOKENS, CompletionFields
from outpace.serve.surfaces.engine_fields import request_settings, stop_strings
from outpace.serve.surfaces.openai_parts import DONE, head, output_rule, text_of, top_logprobs, usage_of
from outpace.serve.surfaces.surface import EventWriter, Exchange, Surface
from outpace.serve.telemetry.figures import request_metrics
from outpace.serve.web.event_stream import ServerEvent
from outpace.serve.web.failures import APIFailure, bad_field
from outpace.text import encode

KIND = "text_completion"


class CompletionSurface(Surface[CompletionFields]):
    """OpenAI's completions of plain text."""

    name, id_prefix = "completions", "cmpl-"

    def job(self, exchange: Exchange[CompletionFields]) -> Job:
        fields, served = exchange.fields, exchange.served
        limits = served.settings.limits
        served.check_name(fields.model)
        if fields.best_of not in (None, 1 if fields.n is None else fields.n):
            raise bad_field("best_of", "all answers are returned: give n alone")
        if fields.echo and fields.logprobs is not None:
            raise bad_field("echo", "log-probabilities of prompts are not computed: leave out echo or logprobs")
        rule = output_rule(fields.structured_outputs, fields.response_format, limits)
        given = {
            **request_settings(fields, served),
            **({} if rule is None else rule.fields),
            "stop": stop_strings(fields.stop, limits),
            "n": 1 if fields.n is None else fields.n,
            "logprobs": top_logprobs(fields.logprobs, fields.logprobs is not None, limits),
            "prediction": "" if fields.prediction is None else text_of(fields.prediction.content, "prediction"),
        }
        requests = []
        for prompt in fields.prompts:
            tokens = _tokens(prompt, fields, served)
            most = min(fields.max_tokens or USUAL_TOKENS, served.room(len(tokens)))
            requests.append(Request.from_keywords(tokens, {**given, "max_tokens": most}))
        return Job(requests, stream=bool(fields.stream), prompts=[str(prompt) for prompt in fields.prompts])

    def reply(self, exchange: Exchange[CompletionFields], outcome: JobOutcome) -> dict[str, Any]:
        choices = []
        for i, answer in enumerate(outcome.answers):
            shown = None if answer.logprobs is None else completion_logprobs(exchange.served, answer.logprobs)
            choice = _choice(i, _echo(exchange, outcome.prompts[i]) + answer.output.content)
            choice |= {"finish_reason": answer.finish_reason, "stop_reason": answer.stop, "logprobs": shown}
            if exchange.fields.return_token_ids:
                choice |= {"token_ids": answer.tokens, "prompt_token_ids": outcome.prompts[i]}
            choices.append(choice)
        figures = {"usage": usage_of(outcome.usage), "metrics": request_metrics(outcome)}
        return {**head(exchange, KIND), "choices": choices, **figures}

    def writer(self, exchange: Exchange[CompletionFields], run: JobRun) -> EventWriter:
        return CompletionWriter(exchange, run)


class CompletionWriter(EventWriter):
    """Writes the chunks of completions."""

    def __init__(self, exchange: Exchange[CompletionFields], run: JobRun):
        self.exchange, self.run = exchange, run
        self._lengths: dict[int, int] = {}  # of the text of each answer so far, in characters of its tokens
        options = exchange.fields.stream_options
        self._usage = bool(options and options.include_usage)
        self._each_usage = bool(options and options.continuous_usage_stats)

    def begin(self) -> list[ServerEvent]:
        if not self.exchange.fields.echo:
            return []
        prompts = [seq.tokens[: seq.prompt_length] for seq in self.run.seqs]
        return [self._chunk([_choice(i, _echo(self.exchange, prompt))]) for i, prompt in enumerate(prompts)]

    def write(self, delta: Delta) -> list[ServerEvent]:
        text = "".join(part.text for part in delta.parts if hasattr(part, "text"))
        choice = _choice(delta.index, text) | {"finish_reason": delta.finish_reason, "stop_reason": delta.stop}
        if delta.logprobs:
            start = self._lengths.get(delta.index, 0)
            shown = completion_logprobs(self.exchange.served, delta.logprobs, start)
            self._lengths[delta.index] = shown["text_offset"][-1] + len(shown["tokens"][-1])
            choice["logprobs"] = shown
        if self.exchange.fields.return_token_ids:
            choice["token_ids"] = delta.tokens
        elif not text and not delta.logprobs and delta.finish_reason is None:
            return []
        return [self._chunk([choice])]

    def end(self, outcome: JobOutcome) -> list[ServerEvent]:
        if not self._usage:
            return [DONE]
        return [self._chunk([], {"usage": usage_of(outcome.usage), "metrics": request_metrics(outcome)}), DONE]

    def fail(self, failure: APIFailure) -> list[ServerEvent]:
        return [ServerEvent(failure.openai()), DONE]

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> ServerEvent:
        if usage is None and (self._usage or self._each_usage):
            usage = {"usage": usage_of(self.run.usage) if self._each_usage else None}
        return ServerEvent({**head(self.exchange, KIND), "choices": choices, **(usage or {})})


def completion_logprobs(served: Served, logprobs: list[Logprob], start: int = 0) -> dict[str, Any]:
    """Return log-probabilities as completions show them; the first token begins at character `start`."""
    tokens, offsets, tops = list[str](), list[int](), list[dict[str, float]]()
    at = start
    for each in logprobs:
        text = served.token_text(each.token, first=at == 0)
        tops.append({served.token_text(token, first=at == 0): value for token, value in each.top.items()})
        tops[-1].setdefault(text, each.logprob)
        tokens.append(text)
        offsets.append(at)
        at += len(text)
    own = [max(each.logprob, -9999.0) for each in logprobs]  # JSON has no infinity
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}


def _choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


def _echo(exchange: Exchange[CompletionFields], prompt: list[int]) -> str:
    return str(exchange.served.tokenizer.decode(prompt, skip_special_tokens=True)) if exchange.fields.echo else ""


def _tokens(prompt: str | list[int], fields: CompletionFields, served: Served) -> list[int]:
    if isinstance(prompt, str) and fields.add_special_tokens is False:
        prompt = list(served.tokenizer.encode(prompt, add_special_tokens=False))
    return encode(prompt, served.model.tokenizer, served.model.lm.vocab)
