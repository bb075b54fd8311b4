"""Checks that a server honours the settings of a request: under speculation, some silently ignore them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from outpace.sampling.processors import CountPenalty
from outpace.sampling.sampler import Sampler
from outpace.sampling.settings import Sampling
from outpace.verify.records import Check, Verdict
from outpace.verify.servers.answers import ServerAnswers
from outpace.verify.servers.client import HTTPFailure
from outpace.verify.servers.compare import first_divergence, lag, rounding_of
from outpace.verify.servers.local import LocalJudge
from outpace.verify.servers.reply import Reply

HIGH_TEMPERATURE = {"temperature": 1.5}
NARROW: dict[str, Any] = {"top_p": 1e-6, "top_k": 1, "min_p": 1.0}  # each one leaves only the likeliest token
PENALTY = 2.0  # the maximum that OpenAI allows
BIAS = 100.0
SOME_TOKEN = 100  # in any vocabulary; used if no ids are known
LENGTHS = (1, 2, 3, 5)  # around the tokens that one speculative pass gives
STOP = 4  # characters of the stop string

Outcome = tuple[Verdict, str]


@dataclass(frozen=True)
class SettingsCheck:
    """Checks of each setting on its own; a server may refuse a setting."""

    answers: ServerAnswers
    local: LocalJudge | None

    def all(self) -> dict[str, Callable[[], Check]]:
        tries: dict[str, Callable[[], Outcome]] = {
            "temperature": self.temperature,
            **{name: partial(self.narrow, name) for name in NARROW},
            "logit_bias": self.logit_bias,
            "presence_penalty": self.presence_penalty,
            "stop": self.stop,
            "max_tokens": self.max_tokens,
            "n": self.count,
            "logprobs": self.shape,
        }
        return {f"settings: {name}": partial(self._check, name, attempt) for name, attempt in tries.items()}

    def _check(self, name: str, attempt: Callable[[], Outcome]) -> Check:
        try:
            verdict, summary = attempt() if self._stable else ("skip", "the server is not repeatable")
        except HTTPFailure as failure:
            verdict = "skip" if failure.refusal else "fail"
            summary = f"refused: {failure}" if failure.refusal else str(failure)
        return Check(self.answers.subject, f"settings: {name}", verdict, summary)

    @property
    def _stable(self) -> list[int]:
        """Prompts with the same answer twice: any other answer is the effect of the setting."""
        return [index for index, (first, again) in enumerate(self.answers.repeats) if first.text == again.text]

    @property
    def _prompt(self) -> int:
        """The prompt with the longest answer, which shows the most."""
        return max(self._stable, key=lambda index: len(self.answers.first[index].text))

    @property
    def _usual(self) -> Reply:
        return self.answers.first[self._prompt]

    def _ask(self, **fields: Any) -> Reply:
        return self.answers.on.complete(self.answers.plan.prompts[self._prompt], **self.answers.greedy | fields)

    def temperature(self) -> Outcome:
        texts = {self._ask(**HIGH_TEMPERATURE, seed=seed).text for seed in range(1, 5)}
        if texts == {self._usual.text}:
            return (
                "fail",
                f"four answers at temperature {HIGH_TEMPERATURE['temperature']} equal the greedy one: it is ignored",
            )
        return "pass", f"{len(texts)} different texts in 4 answers at temperature {HIGH_TEMPERATURE['temperature']}"

    def narrow(self, name: str) -> Outcome:
        """Check that sampling from one token only gives the greedy answer."""
        asked = f"{name}={NARROW[name]} at temperature {HIGH_TEMPERATURE['temperature']}"
        replies = [self._ask(**HIGH_TEMPERATURE, **{name: NARROW[name]}, seed=seed) for seed in (1, 2)]
        found = [first_divergence((self._usual, reply), self._prompt, self.answers.drift) for reply in replies]
        parted = [divergence for divergence in found if divergence is not None and not divergence.explained]
        if not parted:
            return "pass", f"{asked} gives the greedy text"
        return "fail", f"{asked} leaves the greedy text at position {min(d.position for d in parted)}: it is ignored"

    def logit_bias(self) -> Outcome:
        ids = self._ids(self._usual)
        token = next((other for other in ids[:-1] if other != ids[0]), SOME_TOKEN)  # the last one may be a stop token
        forced = self._ask(logit_bias={str(token): BIAS})
        got: list[Any] = self._ids(forced) or [t.text for t in forced.tokens or []]
        if forced.text == self._usual.text or len(set(got[:2])) > 1 or (ids and got[:1] != [token]):
            return "fail", f"a bias of {BIAS:g} does not force token {token}: the answer is {forced.text[:20]!r}"
        if not ids:
            return "pass", f"a bias of {BIAS:g} forces a token; a ban was not tested, as token ids are unknown"
        banned = self._ids(self._ask(logit_bias={str(ids[0]): -BIAS}))
        if ids[0] in banned:
            return "fail", f"a bias of {-BIAS:g} does not ban token {ids[0]}: it is at position {banned.index(ids[0])}"
        return "pass", "a bias forces one token and bans another"

    def _ids(self, reply: Reply) -> list[int]:
        if reply.ids is not None or self.local is None:
            return reply.ids or []
        tokens, how = self.local.tokens(reply)
        return [] if how == "text" else tokens

    def presence_penalty(self) -> Outcome:
        """Judge by the local model, if any; else the text must change where the penalty exceeds a token's lead."""
        index, place = self._outweighed()
        prompt = self.answers.plan.prompts[index]
        reply = self.answers.on.complete(prompt, **self.answers.greedy, presence_penalty=PENALTY)
        if self.local is not None and self.local.tokens(reply)[1] != "text":
            return self._judged(index, reply)
        if place is None:
            return "skip", "the penalty would change no answer: none repeats a token whose lead is small enough"
        parted = first_divergence((self.answers.first[index], reply), index, self.answers.drift)
        if parted is None or parted.position > place:
            return "fail", f"a penalty of {PENALTY:g} keeps the repeated token at position {place}: it is ignored"
        return "pass", f"a penalty of {PENALTY:g} changes the text at position {parted.position}"

    def _outweighed(self) -> tuple[int, int | None]:
        """Find the first position of an answer at which a repeated token leads a new one by less than the penalty."""
        margin = 2 * (rounding_of(self.answers.drift) or 0.0)
        replies = self.answers.first if self.answers.off is None else self.answers.plain  # plain ones have logprobs
        for index in self._stable:
            seen: set[str] = set()
            for place, token in enumerate(replies[index].tokens or []):
                new = [text for text in token.top if text not in seen]
                if token.text in seen and any(lag(token, [text]) < PENALTY - margin for text in new):
                    return index, place
                seen.add(token.text)
        return self._prompt, None

    def _judged(self, index: int, reply: Reply) -> Outcome:
        assert self.local is not None
        reading = self.local.read(self.answers.plan.prompts[index], reply)
        starts = (len(reading.prompt), 0)  # OpenAI counts the tokens of the answer; llama.cpp counts the prompt too
        samplers = [Sampler(Sampling(), [CountPenalty(PENALTY, 0.0, start)]) for start in starts]
        judged = [self.local.wrong(reading, index, sampler) for sampler in samplers]
        wrong = [sum(not divergence.explained for divergence in found) for found in judged]
        if not wrong[0]:
            return "pass", f"{len(reading.tokens)} tokens judged with a penalty of {PENALTY:g}: none wrong"
        if not wrong[1]:
            return "pass", f"a penalty of {PENALTY:g} counts the prompt's tokens too, unlike OpenAI"
        return "fail", f"{wrong[0]} of {len(reading.tokens)} tokens are wrong with a penalty of {PENALTY:g}"

    def stop(self) -> Outcome:
        """Check that the text ends right before the stop string, which may cross token boundaries."""
        text = self._usual.text
        places = range(len(text) // 2, len(text) - STOP + 1)
        stop = next((text[at : at + STOP] for at in places if "\ufffd" not in text[at : at + STOP]), None)
        if stop is None:
            return "skip", "the greedy text is too short for a stop string"
        wanted, got = text[: text.index(stop)], self._ask(stop=[stop])
        if got.text == wanted:
            return "pass", f"ends right before {stop!r}"
        if got.text.startswith(wanted):
            return "fail", f"continues past {stop!r} with {got.text[len(wanted) :][:20]!r}"
        tie = self._tie(got)
        return "tie" if tie else "fail", f"with the stop string {stop!r} the text differs: {got.text[:40]!r}"

    def _tie(self, got: Reply) -> bool:
        parted = first_divergence((self._usual, got), self._prompt, self.answers.drift)
        return parted is not None and parted.explained

    def max_tokens(self) -> Outcome:
        said = []
        for most in LENGTHS:
            reply = self._ask(max_tokens=most)
            if reply.length is None:
                return "skip", "the server shows neither tokens nor their number"
            other = not self._usual.text.startswith(reply.text.rstrip("\ufffd")) and not self._tie(reply)
            if reply.length > most or other:
                said.append(f"max_tokens={most} gave {reply.length} tokens: {reply.text[:40]!r}")
            elif reply.finish_reason == "length" and reply.counted not in (None, reply.length):
                said.append(f"max_tokens={most} gave {reply.length} tokens, and usage says {reply.counted}")
        return ("fail", "; ".join(said)) if said else ("pass", f"respected at {', '.join(map(str, LENGTHS))}")

    def count(self) -> Outcome:
        prompt = self.answers.plan.prompts[self._prompt]
        replies = self.answers.on.choices(prompt, **self.answers.greedy | HIGH_TEMPERATURE, n=2)
        return ("pass" if len(replies) == 2 else "fail"), f"n=2 gave {len(replies)} answers"

    def shape(self) -> Outcome:
        """Check that token texts join to the text, and that every token is among those shown at its position."""
        tokens = self._usual.tokens
        if tokens is None:
            return "skip", "the server shows no logprobs"
        joined = "".join(token.text for token in tokens)
        if not joined.startswith(self._usual.text) and "\ufffd" not in joined + self._usual.text:
            return "fail", f"the tokens {joined[:30]!r}... do not join to the text {self._usual.text[:30]!r}..."
        lost = sum(bool(token.top) and token.text not in token.top for token in tokens)
        if lost:
            return "fail", f"{lost} of {len(tokens)} greedy tokens are not among the likeliest tokens shown"
        return "pass", f"{len(tokens)} tokens join to the text"
