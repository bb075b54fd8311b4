"""Passes that begin before the one before them was read: the same texts, and none of another's."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outpace.api.model import Model
from outpace.api.request import Request
from outpace.core.engine import Engine
from outpace.core.lm import Picked
from outpace.core.tree import Tree
from outpace.models.compiled.graph_pass import GraphKey
from outpace.models.compiled.picks import RunAheadGate
from outpace.models.compiled.run_ahead import LastPass, PassAhead
from outpace.models.segment import Segment, SegmentOutput
from outpace.sampling.noise import gumbel
from outpace.sampling.sampler import Pick
from outpace.testing import ToyLM
from tests.conftest import settings_of

PROMPTS = [[1, 2, 3, 1, 2], [5], [9, 8, 7, 6] * 5, [4, 4]]
CAPTURED: Any = SimpleNamespace(key=GraphKey(2, 2))


class Device(ToyLM):
    """Chooses by itself, and begins the next pass when it is told to, as a model that runs as graphs does."""

    asynchronous = True

    def __init__(self) -> None:
        super().__init__()
        self._last: LastPass | None = None
        self._sent = PassAhead()
        self._outputs: dict[int, SegmentOutput] = {}  # of the pass that began ahead
        self.run_ahead = self
        self.ran = self.begun = self.used = 0

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        if self._sent.take(segments, taps):
            self.used += 1
            return [self._outputs[segment.slot] for segment in segments]
        self.ran += 1
        pairs = zip(segments, super().forward(segments, taps), strict=True)
        outputs = [self._picked(segment, output) for segment, output in pairs]
        self._last = LastPass(CAPTURED, segments, outputs, None)
        return outputs

    def begin(self, slots: Seq[int], picks: Seq[Pick | None]) -> bool:
        segments = None if self._last is None else self._last.next(slots, picks)
        if segments is None or self._last is None:
            return False
        chosen = list[int]()  # at each token of the last pass; nobody looks at those of a prompt
        for done, output in zip(self._last.segments, self._last.outputs, strict=True):
            chosen += [0] * len(done.pending) + (list(output.picked.tokens) if output.picked else [])
        outputs = []
        for segment in segments:
            slot = self.slots[segment.slot]
            assert slot.layout is not None
            fed = slot.tokens + slot.layout.tokens + [chosen[segment.tree.tokens[0]]]
            assert len(fed) == segment.end
            outputs.append(self._picked(segment, SegmentOutput(self.run(fed)[0][-1:], {})))
        self.begun += 1
        self._sent = PassAhead.after(self._last, segments)
        self._outputs = {segment.slot: output for segment, output in zip(segments, outputs, strict=True)}
        self._last = LastPass(CAPTURED, segments, outputs, None)
        return True

    def _picked(self, segment: Segment, output: SegmentOutput) -> SegmentOutput:
        pick = segment.pick
        if pick is None or output.logits is None or pick.filters:
            return output
        assert isinstance(output.logits, torch.Tensor)
        logits = output.logits.clone()
        for i, position in enumerate(segment.positions[len(segment.pending) :]):
            if pick.temperature:
                noise = gumbel(torch.arange(self.vocab), pick.seed, position + 1)
                logits[i] = (logits[i] / pick.temperature).double() + noise
        return replace(output, picked=Picked(logits.argmax(-1).tolist(), logits.amax(-1).tolist(), [1.0] * len(logits)))

    def release(self, slot: int) -> None:
        self._sent.drop(slot)
        super().release(slot)

    def feed(
        self, tokens: Seq[list[int]], slots: Seq[int], limit: int | None = None, defer: bool = False
    ) -> list[bool]:
        for slot in slots:
            self._sent.drop(slot)
        return super().feed(tokens, slots, limit, defer)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", ["plain", "suffix", "draft", "auto", "recycling"])
def test_texts_stay_the_same(method: str, temperature: float, toy: Model) -> None:
    device = Device()
    model = Model(device)
    model.max_batch = 3  # one joins when another has left
    lengths = [{"max_tokens": n, "temperature": temperature, "seed": n} for n in (20, 33, 7, 16)]
    expected = [toy.generate(p, method="plain", **s).tokens for p, s in zip(PROMPTS, lengths, strict=True)]
    engine = Engine(device, max_batch=3)
    seqs = [
        model.sequence(Request.from_keywords(p, {**settings_of(method, ToyLM(layers=1)), **s}))
        for p, s in zip(PROMPTS, lengths, strict=True)
    ]
    for seq in seqs:
        engine.submit(seq)
    for _ in engine.run():
        pass
    assert [seq.generated for seq in seqs] == expected
    assert method != "plain" or device.used > 20


def test_no_pass_is_in_vain_where_the_length_is_known() -> None:
    device = Device()
    Model(device).generate(PROMPTS[0], method="plain", max_tokens=20)
    assert (device.ran, device.begun, device.used) == (1, 19, 19)


def test_an_answer_that_stops_leaves_one_pass_unread(toy: Model) -> None:
    device = Device()
    text = toy.generate(PROMPTS[0], method="plain", max_tokens=20).tokens
    stop = text[9]
    found = Model(device).generate(PROMPTS[0], method="plain", max_tokens=20, stop_token_ids=[stop])
    assert found.tokens == text[: text.index(stop) + 1]
    assert device.begun == device.used + 1 and not device._sent.slots


def test_a_row_with_another_text_gets_none_of_the_last_one(toy: Model) -> None:
    """The new text is as long as the old one, and ends with the token that the old one went on with."""
    device = Device()
    model = Model(device)
    text = toy.generate(PROMPTS[0], method="plain", max_tokens=4).tokens
    model.generate(PROMPTS[0], method="plain", max_tokens=20, stop_token_ids=[text[3]])
    other = [8] * (len(PROMPTS[0]) + 3) + [text[3]]
    again = model.generate(other, method="plain", max_tokens=6)
    assert again.tokens == toy.generate(other, method="plain", max_tokens=6).tokens


@pytest.mark.parametrize(
    "settings", [{"logprobs": 2}, {"repetition_penalty": 1.3}, {"temperature": 0.8, "top_p": 0.9}], ids=str
)
def test_nothing_begins_ahead_where_logits_are_looked_at(settings: dict[str, Any], toy: Model) -> None:
    device = Device()
    found = Model(device).generate(PROMPTS[0], method="plain", max_tokens=12, **settings)
    assert found.tokens == toy.generate(PROMPTS[0], method="plain", max_tokens=12, **settings).tokens
    assert device.begun == 0


def test_a_step_by_itself_begins_nothing(toy: Model) -> None:
    device = Device()
    engine = Engine(device, overlap=False)
    engine.submit(Model(device).sequence(Request.from_keywords([1, 2], {"method": "plain", "max_tokens": 5})))
    for _ in range(3):
        engine.step()
    assert device.begun == 0


def test_jobs_are_known_only_behind_single_tokens() -> None:
    pick = Pick(0, 0.0)
    chosen = SegmentOutput(torch.zeros(1, 4), {}, Picked([3], [0.0], [1.0]))
    jobs = [Segment(4, 10, [1, 2], Tree([7]), pick=pick), Segment(2, 5, [], Tree.chain([1, 2]), pick=pick)]
    last = LastPass(CAPTURED, jobs, [chosen, chosen])
    (job,) = last.next([4], [pick]) or []
    assert (job.slot, job.start, job.tokens) == (4, 13, [2])  # its choice is the third of the pass
    assert last.next([2], [pick]) is None and last.next([4, 9], [pick, pick]) is None
    assert last.next([4], [None]) is None
    host = replace(chosen, picked=Picked([3], [0.0], [1.0], on_device=False))  # the device has chosen something else
    assert last._replace(outputs=[host, host]).next([4], [pick]) is None


def test_passes_that_are_often_in_vain_are_no_longer_begun() -> None:
    gate, begun = RunAheadGate(), []
    for now in range(60):
        begun.append(gate.is_open())
        gate.unsure = now < 20
    assert all(begun[:4]) and not any(begun[6:20]) and all(begun[-20:])
