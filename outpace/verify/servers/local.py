"""A local model that judges the answers of a server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from outpace.api.model import Model
from outpace.errors import UsageError
from outpace.sampling.sampler import Sampler
from outpace.sampling.settings import Sampling
from outpace.text import Tokenizer, encode
from outpace.verify.judge import Answer, Judge
from outpace.verify.records import Check, Divergence, verdict_of
from outpace.verify.servers.answers import ServerAnswers
from outpace.verify.servers.compare import NEAR, rounding_of
from outpace.verify.servers.reply import Reply

How = Literal["ids", "token texts", "text"]
GREEDY = Sampler(Sampling())


@dataclass(frozen=True)
class AnswerReading:
    """An answer in the local model's tokens, and how they were obtained."""

    prompt: list[int]
    tokens: list[int]
    how: How


class LocalJudge:
    """Reads and judges the answers of one server."""

    def __init__(self, model: Model, answers: ServerAnswers):
        if model.tokenizer is None:
            raise UsageError("the reference model has no tokenizer, which is needed to read a server's answers")
        self.model, self.answers = model, answers
        self.tokenizer: Tokenizer = model.tokenizer
        self.judge = Judge(model.lm.reference())

    def read(self, prompt: str, reply: Reply) -> AnswerReading:
        return AnswerReading(self.prompt(prompt, reply), *self.tokens(reply))

    def tokens(self, reply: Reply) -> tuple[list[int], How]:
        """Use the ids that the server gives, else look tokens up by their texts, else encode the whole text again."""
        if reply.ids is not None:
            return reply.ids, "ids"
        if reply.tokens is not None:
            ids = [self._ids.get(token.text, -1) for token in reply.tokens]
            if all(token >= 0 for token in ids):
                return ids, "token texts"
        return self.tokenizer.encode(reply.text, add_special_tokens=False), "text"

    def prompt(self, prompt: str, reply: Reply) -> list[int]:
        """The prompt's tokens as the server reports them, else as it should have encoded them."""
        asked = [{"role": "user", "content": prompt}] if reply.chat else prompt
        return reply.prompt_ids or encode(asked, self.tokenizer, self.model.lm.vocab)

    @cached_property
    def _ids(self) -> dict[str, int]:
        """Token ids by text; -1 if several tokens share the text."""
        out: dict[str, int] = {}
        for token in range(min(len(self.tokenizer), self.model.lm.vocab)):
            text = self.tokenizer.decode([token])
            out[text] = -1 if text in out else token
        return out

    def with_end(self, reading: AnswerReading, reply: Reply) -> AnswerReading:
        """Append the stop token that ended the answer, which most servers do not show."""
        stops = sorted(self.model.stop_token_ids)
        if reply.finish_reason != "stop" or not stops or (reading.tokens and reading.tokens[-1] in stops):
            return reading
        logits = self.judge.reference.native(reading.prompt + reading.tokens, 1)[0]
        return replace(reading, tokens=[*reading.tokens, stops[int(logits[stops].argmax())]])

    def logprobs(self, reading: AnswerReading, reply: Reply) -> list[tuple[float, float]]:
        """Logprobs of the chosen tokens, as pairs: ours and the server's."""
        shown = reply.logprobs
        if not any(shown) or reading.how == "text":
            return []
        text = (reading.prompt + reading.tokens)[:-1]
        ours = self.judge.reference.precise(text, len(reading.tokens)).log_softmax(-1)  # [tokens, vocab]
        asked = zip(ours, reading.tokens, shown, strict=True)
        return [(float(row[token]), theirs) for row, token, theirs in asked if theirs is not None]

    def wrong(self, reading: AnswerReading, index: int, sampler: Sampler) -> list[Divergence]:
        """Find tokens that the model itself would not choose, by the larger of our rounding and the server's."""
        found = self.judge.answer(Answer(reading.prompt, reading.tokens, sampler), index)
        return [self._weighed(divergence) for divergence in found]

    def _weighed(self, divergence: Divergence) -> Divergence:
        theirs = self.rounding
        tie = divergence.explained or (divergence.gap is not None and divergence.gap <= 2 * theirs)
        texts = (self.tokenizer.decode([divergence.expected]), self.tokenizer.decode([divergence.got]))
        rounding = max(divergence.rounding or 0.0, theirs)
        return replace(divergence, rounding=rounding, explained=tie, texts=texts)

    @cached_property
    def rounding(self) -> float:
        """How far the server's logprobs of likely tokens are from ours, through its rounding and ours."""
        near = (abs(a - b) for a, b in self.compared if max(a, b) > NEAR)
        return rounding_of(max(near, default=None)) or 0.0

    @cached_property
    def compared(self) -> list[tuple[float, float]]:
        """Logprobs of all greedy answers, as pairs: ours and the server's."""
        asked = zip(self.answers.plan.prompts, self.answers.first, strict=True)
        return [pair for prompt, reply in asked for pair in self.logprobs(self.read(prompt, reply), reply)]


def every_token(local: LocalJudge) -> Check:
    """Check that every token of the greedy answers is the local model's own choice, in higher precision."""
    answers = local.answers
    found, tokens, ways = list[Divergence](), 0, set[How]()
    for index, (prompt, reply) in enumerate(zip(answers.plan.prompts, answers.first, strict=True)):
        reading = local.with_end(local.read(prompt, reply), reply)
        ways.add(reading.how)
        tokens += len(reading.tokens)
        found += local.wrong(reading, index, GREEDY)
    bugs = sum(not d.explained for d in found)
    summary = f"{tokens} tokens judged in higher precision: {len(found) - bugs} ties, {bugs} wrong"
    if "text" in ways:
        summary += "; the server shows no tokens, so its texts were encoded again, which may give other tokens"
    elif "token texts" in ways:
        summary += "; tokens were looked up by their texts"
    figures = {"tokens": tokens, "ties": len(found) - bugs, "wrong": bugs, "tokens_from": sorted(ways)}
    return Check(answers.subject, "every token", verdict_of(found), summary, found, figures)
