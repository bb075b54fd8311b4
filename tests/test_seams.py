"""Every seam has a toy user: what a model, a layout, a rule or a policy of another kind needs is really there."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import outpace
from outpace import registry
from outpace.api.load_options import LoadOptions
from outpace.api.model import Model
from outpace.api.request import Request
from outpace.core.drafter import Drafter
from outpace.core.engine import Engine
from outpace.core.layout import Layout
from outpace.core.lm import LM, Context, Logits, Picks, Scores
from outpace.core.policy import PassReport, Policy
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import Budget, Tree
from outpace.core.verifier import Verifier
from outpace.errors import UnsupportedModel, UsageError
from outpace.methods.plain import Plain
from outpace.models.cacheless import CachelessLM
from outpace.models.segment import Segment, SegmentOutput
from outpace.sampling.noise import uniform
from outpace.sampling.sampler import Sampler
from outpace.sampling.settings import Sampling
from outpace.testing import ToyLM
from outpace.threads.worker import Worker

PROMPT = [1, 2, 3, 4, 1, 2, 3]


def run(model: Model, prompt: list[int], change: Any = lambda seq: None, **settings: Any) -> Sequence:
    """One request through an engine of its own, changed before it is submitted."""
    engine = Engine(model.lm)
    seq = model.sequence(Request.from_keywords(prompt, {"max_tokens": 12, **settings}))
    change(seq)
    engine.submit(seq)
    for _ in engine.run():
        pass
    assert seq.error is None
    return seq


# A model that has the six methods and nothing else.


class SixMethods(LM):
    """Scores by running each path through a toy. It has no capability, and no cache."""

    def __init__(self) -> None:
        self.toy, self.worker = ToyLM(), Worker()
        self.vocab, self.max_length = self.toy.vocab, 4096
        self.texts: dict[int, list[int]] = {}
        self.scored: dict[int, Layout] = {}

    def acquire(self, tokens: list[int], *, context: Context = None, taps: tuple[int, ...] = ()) -> int:
        slot = len(self.texts)
        self.texts[slot] = []
        return slot

    def release(self, slot: int) -> None:
        self.texts[slot] = []

    def feed(
        self, tokens: Seq[list[int]], slots: Seq[int], limit: int | None = None, defer: bool = False
    ) -> list[bool]:
        self.texts.update({slot: list(text) for text, slot in zip(tokens, slots, strict=True)})
        return [True] * len(slots)

    def score(
        self, layouts: Seq[Layout], slots: Seq[int], since: Seq[int] | None = None, picks: Picks = None
    ) -> list[Scores]:
        found = []
        for i, (layout, slot) in enumerate(zip(layouts, slots, strict=True)):
            assert isinstance(layout, Tree)
            self.scored[slot] = layout
            nodes = range(since[i] if since else 0, len(layout))
            paths = [self.texts[slot] + [layout.tokens[n] for n in layout.path(node)] for node in nodes]
            found.append(Scores(Logits(torch.stack([self.toy.run(path)[0][-1] for path in paths]))))
        return found

    def keep(self, paths: Seq[list[int]], slots: Seq[int]) -> None:
        for path, slot in zip(paths, slots, strict=True):
            self.texts[slot] += [self.scored[slot].tokens[node] for node in path]

    def clear(self) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("method", ["plain", "suffix", "recycling", "lookahead", "auto", "draft"])
def test_six_methods_are_enough(method: str) -> None:
    model, toy = Model(SixMethods()), Model(ToyLM())
    given = {"draft": SixMethods()} if method == "draft" else {}
    for settings in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3}):
        answers = model.generate([PROMPT, [5]], method=method, max_tokens=16, **settings, **given)
        plain = toy.generate([PROMPT, [5]], method="plain", max_tokens=16, **settings)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]


@pytest.mark.parametrize("method", ["layerskip", "pruned", "via_sd", "eagle3:head=random"])
def test_a_capability_that_is_not_there_is_named(method: str) -> None:
    with pytest.raises((UnsupportedModel, UsageError), match=r"layers|hidden states"):
        Model(SixMethods()).generate(PROMPT, method=method, max_tokens=4)


# Logits that have to be fetched.


class Fetched(Logits):
    """Counts the nodes whose logits are read."""

    def __init__(self, table: Tensor, read: list[int]):
        super().__init__(table)
        self.read = read

    def __getitem__(self, node: int) -> Tensor:
        self.read.append(node)
        return super().__getitem__(node)

    def all(self) -> Tensor:
        self.read.extend(range(len(self)))
        return super().all()


class Far(ToyLM):
    """A runtime that owns its memory: logits are read from it node by node."""

    lazy_logits = True

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        found = []
        for output in super().forward(segments, taps):
            assert output.logits is None or isinstance(output.logits, Tensor)
            found.append(
                SegmentOutput(output.logits if output.logits is None else Fetched(output.logits, self.read), {})
            )
        return found


def test_only_logits_that_are_needed_are_fetched() -> None:
    far, toy = Far(), Model(ToyLM())
    answer = Model(far).generate(PROMPT, method="suffix", max_tokens=16, temperature=0.9)
    assert answer.tokens == toy.generate(PROMPT, method="plain", max_tokens=16, temperature=0.9).tokens
    assert len(far.read) == 16  # one for each token, whatever was drafted
    assert answer.stats.drafted > 0


# What a text is conditioned on besides its tokens.


class Conditioned(CachelessLM):
    """An encoder-decoder in small: what follows a text depends on the context of its slot too."""

    def __init__(self) -> None:
        super().__init__()
        self.toy = ToyLM()
        self.vocab, self.max_length = self.toy.vocab, 256
        self.computed = 0  # tokens that were run

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        outputs = []
        for segment in segments:
            slot = self.slots[segment.slot]
            assert isinstance(slot.context, str)
            audio = [ord(letter) % self.vocab for letter in slot.context]
            held = audio + slot.tokens + segment.pending
            nodes = range(segment.since, 0 if segment.layout is None else len(segment.layout))
            paths = [held + [segment.tree.tokens[n] for n in segment.tree.path(node)] for node in nodes]
            self.computed += len(segment.tokens)
            logits = [self.toy.run(path)[0][-1] for path in paths]
            outputs.append(SegmentOutput(torch.stack(logits) if logits else None, {}))
        return outputs


@pytest.mark.parametrize("method", ["plain", "suffix", "draft"])
def test_a_slot_is_reused_for_its_own_context_alone(method: str) -> None:
    """Windows of speech begin with the same tokens over different audio: a prefix of tokens alone would mix them."""
    prompt = list(range(1, 41))

    def answer(lm: Conditioned, context: str, name: str = method) -> list[int]:
        def given(seq: Sequence) -> None:
            seq.context = context

        draft = {"draft": Conditioned()} if name == "draft" else {}
        return run(Model(lm), prompt, given, method=name, **draft).generated

    lm = Conditioned()
    texts = {context: answer(Conditioned(), context, "plain") for context in ("a song", "a storm")}
    assert texts["a song"] != texts["a storm"]
    for context in ("a song", "a storm", "a song"):
        assert answer(lm, context) == texts[context]
    before = lm.computed
    assert answer(lm, "a song") == texts["a song"]
    assert lm.computed - before < len(prompt)  # the prompt was known for this context


# Prompts that are fed in pieces.


class Counted(ToyLM):
    """Says how many tokens of prompts each pass fed."""

    chunk = 16

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[tuple[int, int]] = []  # tokens of prompts, sequences that were scored

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        fed = sum(len(segment.pending) for segment in segments if segment.layout is None)
        self.passes.append((fed, sum(segment.layout is not None for segment in segments)))
        return super().forward(segments, taps)


def test_a_long_prompt_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "prompt_tokens", 32)
    long, short = [(7 * i) % 60 for i in range(400)], [1, 2, 3]
    lm, plain = Counted(), Model(ToyLM())
    model, engine = Model(lm), Engine(lm)
    seqs = [model.sequence(Request.from_keywords(p, {"method": "plain", "max_tokens": 20})) for p in (short, long)]
    engine.submit(seqs[0])
    engine.step()
    engine.submit(seqs[1])
    while not seqs[1].generated:
        engine.step()
    assert len(seqs[0].generated) > 8  # it went on while the long prompt was fed
    between = [fed for fed, scored in lm.passes if not scored]
    assert max(between) <= 16 and sum(between) >= 380
    for _ in engine.run():
        pass
    for seq, prompt in zip(seqs, (short, long), strict=True):
        assert seq.generated == plain.generate(prompt, method="plain", max_tokens=20).tokens


def test_a_prompt_alone_is_fed_at_once() -> None:
    lm = Counted()
    seq = Model(lm).sequence(
        Request.from_keywords([(3 * i) % 60 for i in range(900)], {"method": "plain", "max_tokens": 2})
    )
    engine = Engine(lm)
    engine.submit(seq)
    engine.step()
    assert len(seq.generated) == 1


def test_a_request_can_be_cancelled_while_its_prompt_is_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "prompt_tokens", 16)
    lm = Counted()
    model, engine = Model(lm), Engine(lm)
    seqs = [
        model.sequence(Request.from_keywords(p, {"max_tokens": 30}))
        for p in ([1, 2], [(5 * i) % 60 for i in range(300)])
    ]
    for seq in seqs:
        engine.submit(seq)
        engine.step()
    assert seqs[1] in engine.scheduler.feeding and seqs[1].slot is not None
    engine.cancel(seqs[1])
    assert seqs[1].finish_reason == "cancelled" and not engine.scheduler.feeding
    for _ in engine.run():
        pass
    assert not any(slot.busy for slot in lm.slots)
    assert seqs[0].generated == Model(ToyLM()).generate([1, 2], method="plain", max_tokens=30).tokens


def test_prompts_that_begin_alike_are_computed_once() -> None:
    """Also where the requests come at the same time, before any of them has a cache entry."""
    lm, plain = Counted(), Model(ToyLM())
    prompts = [[(3 * i) % 60 for i in range(200)] + [i] for i in range(6)]
    found = Model(lm).generate(prompts, method="plain", max_tokens=5)
    assert sum(fed for fed, _ in lm.passes) < 210
    for prompt, done in zip(prompts, found, strict=True):
        assert done.tokens == plain.generate(prompt, method="plain", max_tokens=5).tokens


class Sharing(Counted):
    """Runs several prompts in a pass, but none with the token 59."""

    chunk = prompt_tokens = 64
    shares_prompts = True

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        prompts = [segment for segment in segments if segment.layout is None]
        self.most = max(getattr(self, "most", 0), len(prompts))
        assert sum(len(segment.pending) for segment in prompts) <= self.chunk
        if any(59 in segment.pending for segment in prompts):
            raise ZeroDivisionError("in a pass")
        return super().forward(segments, taps)


@pytest.mark.parametrize("running", [False, True])
def test_several_prompts_share_a_pass(running: bool) -> None:
    lm, plain = Sharing(), Model(ToyLM())
    model, engine = Model(lm), Engine(lm)
    prompts = [[(i * j + 3 * i) % 50 for i in range(20 + j)] for j in range(1, 7)] + [[7] * 150]
    seqs = [model.sequence(Request.from_keywords(p, {"method": "plain", "max_tokens": 8})) for p in prompts]
    if running:  # then prompts are fed in pieces between its passes
        engine.submit(model.sequence(Request.from_keywords([1, 2], {"method": "plain", "max_tokens": 40})))
        engine.step()
    for seq in seqs:
        engine.submit(seq)
    assert list(engine.run())
    assert lm.most >= 2
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert seq.generated == plain.generate(prompt, method="plain", max_tokens=8).tokens


class Pieces(Counted):
    """Says which pieces of prompts ran, and runs one prompt in a pass."""

    prompt_tokens = 24

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        prompts = [segment for segment in segments if segment.layout is None]
        assert len(prompts) <= 1
        self.starts = [*getattr(self, "starts", []), *(segment.start for segment in prompts)]
        return super().forward(segments, taps)


def test_where_prompts_share_no_passes_they_run_in_the_same_pieces_beside_others() -> None:
    """Other pieces would round in other ways."""
    lm = Pieces()
    model, engine = Model(lm), Engine(lm)
    prompts = [[5, 6], *([(i * j + 7 * j) % 60 for i in range(60 + 7 * j)] for j in (1, 2, 3))]
    for prompt in prompts:  # the first one runs while the others are fed
        engine.submit(model.sequence(Request.from_keywords(prompt, {"method": "plain", "max_tokens": 40})))
        engine.step()
    assert list(engine.run())
    assert len(lm.starts) > 9 and all(start % lm.chunk == 0 for start in lm.starts)


def test_a_prompt_that_fails_does_not_fail_those_fed_with_it() -> None:
    lm, plain = Sharing(), Model(ToyLM())
    prompts = [[(i * j) % 50 for i in range(20)] for j in (1, 2, 3)]
    prompts[1][5] = 59
    model, engine = Model(lm), Engine(lm)
    seqs = [model.sequence(Request.from_keywords(p, {"method": "plain", "max_tokens": 5})) for p in prompts]
    for seq in seqs:
        engine.submit(seq)
    assert list(engine.run())
    assert [seq.finish_reason for seq in seqs] == ["length", "error", "length"]
    assert isinstance(seqs[1].cause, ZeroDivisionError)
    for i in (0, 2):
        assert seqs[i].generated == plain.generate(prompts[i], method="plain", max_tokens=5).tokens
    assert not any(slot.busy for slot in lm.slots)


# Layouts that are no trees: a block of a diffusion model, every token of which sees all others.

MASK = 63
BLOCK = 4


class BlockLayout(Layout):
    """The tokens of one block, in which all see all."""

    def __init__(self, tokens: list[int]):
        self.tokens = tokens

    def positions(self, start: int, since: int = 0) -> list[int]:
        return [start + i for i in range(since, len(self.tokens))]

    def sees(self, since: int = 0) -> list[int]:
        return [(1 << len(self.tokens)) - 1] * (len(self.tokens) - since)


@dataclass
class BlockState:
    """The block of one request: its last committed token, then what is fixed of the block; the rest are masks."""

    tokens: list[int] = field(default_factory=lambda: [MASK] * BLOCK)


@dataclass(eq=False)
class Blocks(Drafter):
    """Proposes the block as it stands; nothing of it is a draft."""

    limit = Budget(0, 0)

    def root(self, seq: Sequence) -> Layout:
        return BlockLayout([seq.tokens[-1], *seq.state("block", BlockState).tokens])


class FixTheSurest(Verifier):
    """A diffusion sampler: each pass fixes the mask that the model is surest of; a whole block is committed."""

    def verify(self, seq: Sequence, tree: Layout, scores: Scores) -> Step:
        state = seq.state("block", BlockState)
        fix(state.tokens, scores.logits.all()[1:])
        if MASK in state.tokens:
            return Step(tree, [], [], [])  # a pass that commits nothing
        start = len(seq.tokens)
        for place, token in enumerate(state.tokens, start=1):
            if seq.push(token, scores, place):
                break
        state.tokens = [MASK] * BLOCK
        # The block was scored before it was whole, so none of its entries can stay; the tokens are fed again.
        return Step(tree, [], seq.tokens[start:], [0])


def fix(block: list[int], logits: Tensor) -> None:
    probs = logits[:, :MASK].softmax(-1)
    open_places = [i for i, token in enumerate(block) if token == MASK]
    place = max(open_places, key=lambda i: float(probs[i].max()))
    block[place] = int(probs[place].argmax())


def test_a_diffusion_block_runs_through_the_loop() -> None:
    toy = ToyLM()
    text, expected = list(PROMPT), list[int]()
    while len(expected) < 12:
        block = [MASK] * BLOCK
        for _ in range(BLOCK):
            count, inside = len(text) + BLOCK, slice(len(text) - 1, None)
            mask = torch.ones(count, count, dtype=torch.bool).tril()
            mask[inside, inside] = True
            fix(block, toy.run(text + block, (), mask)[0][len(text) :])
        text += block
        expected += block

    def given(seq: Sequence) -> None:
        seq.verifier = FixTheSurest()

    seq = run(Model(ToyLM()), PROMPT, given, method=Blocks())
    assert seq.generated == expected and seq.stats.passes == 12 and seq.stats.tokens == 12


def test_visibility_is_what_sees_says(random_layouts: int = 20) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in range(1, random_layouts):
        parents = [-1, *(int(torch.randint(i, (), generator=generator)) for i in range(1, size))]
        tree = Tree(list(range(size)), parents)
        assert torch.equal(Layout.visible(tree, size // 2), tree.visible(size // 2))


# A model whose noise tokens are scored in place and leave no cache entry (push-forward decoding, trusted).

NOISE = 62
AHEAD = 3


class NoiseLayout(Layout):
    """The last token, then places that the model fills by itself; each sees those before it."""

    def __init__(self, last: int):
        self.tokens = [last, *[NOISE] * (AHEAD - 1)]

    def positions(self, start: int, since: int = 0) -> list[int]:
        return [start + i for i in range(since, AHEAD)]

    def sees(self, since: int = 0) -> list[int]:
        return [(1 << (i + 1)) - 1 for i in range(since, AHEAD)]


@dataclass(eq=False)
class PushForward(Drafter):
    """Lets the model write several tokens a pass."""

    limit = Budget(0, 0)

    def root(self, seq: Sequence) -> Layout:
        return NoiseLayout(seq.tokens[-1])


class Trust(Verifier):
    """Commits what the model wrote. Only the root's entry stays in the cache."""

    def verify(self, seq: Sequence, tree: Layout, scores: Scores) -> Step:
        start = len(seq.tokens)
        for node in range(AHEAD):
            if seq.push(int(scores.logits[node][:NOISE].argmax()), scores, node):
                break
        return Step(tree, [0], seq.tokens[start:], [0])


def test_tokens_without_cache_entries_are_fed_before_the_next_pass() -> None:
    toy, text = ToyLM(), list(PROMPT)
    while len(text) < len(PROMPT) + 12:
        logits = toy.run([*text, *[NOISE] * (AHEAD - 1)])[0]
        text += [int(row[:NOISE].argmax()) for row in logits[len(text) - 1 :]]

    def given(seq: Sequence) -> None:
        seq.verifier = Trust()

    seq = run(Model(ToyLM()), PROMPT, given, method=PushForward())
    assert seq.generated == text[len(PROMPT) :] and seq.stats.passes == 4


# A cache that has fewer entries than tokens.


class Pairs(CachelessLM):
    """Takes two tokens for one entry, as models do that compress their input; entries are kept, and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.toy, self.vocab, self.max_length = ToyLM(), 64, 256

    def entries(self, tokens: int) -> int:
        return (tokens + 1) // 2

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        outputs = []
        for segment in segments:
            slot = self.slots[segment.slot]
            assert segment.start == slot.length == (len(slot.tokens) + 1) // 2
            held = slot.tokens + segment.pending
            nodes = range(segment.since, 0 if segment.layout is None else len(segment.layout))
            texts = [held + [segment.tree.tokens[n] for n in segment.tree.path(node)] for node in nodes]
            logits = [self.toy.run(self._packed(text))[0][-1] for text in texts]
            outputs.append(SegmentOutput(torch.stack(logits) if logits else None, {}))
        return outputs

    def _packed(self, text: list[int]) -> list[int]:
        return [(3 * text[i] + text[i + 1] if i + 1 < len(text) else text[i]) % 64 for i in range(0, len(text), 2)]


@pytest.mark.parametrize("method", ["plain", "suffix", "recycling"])
def test_a_slot_may_have_fewer_entries_than_tokens(method: str) -> None:
    lm, toy = Pairs(), ToyLM()
    text = list(range(1, 30))
    for _ in range(12):
        text.append(int(toy.run(lm._packed(text))[0][-1].argmax()))
    for _ in range(2):  # the second time with a prefix that is known
        assert run(Model(lm), list(range(1, 30)), method=method).generated == text[29:]


# Noise rules.


def test_a_rule_is_a_part_of_the_pick() -> None:
    sampling = Sampling(temperature=0.8, seed=5)
    ours, theirs = Sampler(sampling, rule="inverse_cdf"), Sampler(sampling)
    assert ours.pick is not None and theirs.pick is not None
    assert ours.pick.rule == "inverse_cdf" and ours.pick != theirs.pick


def test_the_inverse_of_the_distribution_is_drawn() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, generator=generator, dtype=torch.float64)
    sampler = Sampler(Sampling(temperature=1.0, seed=9, top_k=7), rule="inverse_cdf")
    counts = torch.zeros(40)
    for length in range(1, 4001):
        prefix = [0] * length
        token = sampler.choose(logits, prefix)
        high = sampler.distribution(logits, prefix).cumsum(-1)
        wanted = uniform(9, length, 0) * float(high[-1])
        assert (high[token - 1] if token else 0.0) - 1e-12 <= wanted <= high[token] + 1e-12
        counts[token] += 1
    distribution = sampler.distribution(logits, [0])
    assert int((distribution > 0).sum()) == 7 and not counts[distribution == 0].any()
    assert (
        float(((counts - 4000 * distribution) ** 2 / (4000 * distribution))[distribution > 0].sum()) < 22.5
    )  # chi squared, 6 degrees, 0.1 %


@pytest.mark.parametrize("method", ["suffix", "recycling", "draft", "layerskip", "auto"])
def test_the_text_of_a_rule_is_the_same_for_every_method(method: str) -> None:
    def texts(name: str) -> list[int]:
        def given(seq: Sequence) -> None:
            seq.sampler = Sampler(seq.sampler.sampling, rule="inverse_cdf")

        draft = {"draft": ToyLM(layers=1)} if name == "draft" else {}
        return run(Model(ToyLM()), PROMPT, given, method=name, temperature=0.8, seed=4, **draft).generated

    plain = texts("plain")
    assert texts(method) == plain
    assert plain != run(Model(ToyLM()), PROMPT, method="plain", temperature=0.8, seed=4).generated


# Policies that see passes.


@dataclass
class Watches(Policy):
    """Remembers what passes took."""

    reports: list[PassReport] = field(default_factory=list)

    def after_pass(self, report: PassReport) -> None:
        self.reports.append(report)


def test_a_policy_gets_a_report_of_every_pass() -> None:
    policy = Watches()
    model = Model(ToyLM())
    answers = model.generate([PROMPT, [5, 6]], method="suffix", policy=policy, max_tokens=10)
    assert max(report.batch_size for report in policy.reports) == 2
    assert len(policy.reports) == max(answer.stats.passes for answer in answers)
    assert all(report.seconds["score"] > 0 and report.tokens >= report.batch_size for report in policy.reports)


def test_an_error_of_a_policy_is_its_requests_own() -> None:
    class Breaks(Policy):
        def after_pass(self, report: PassReport) -> None:
            raise ZeroDivisionError("of a policy")

    with pytest.raises(ZeroDivisionError, match="of a policy"):
        Model(ToyLM()).generate(PROMPT, policy=Breaks(), method="suffix", max_tokens=6)


# Loaders.


def load_toy(name: str, options: LoadOptions) -> Model:
    return Model(ToyLM(seed=int(name.split(".")[0])), name=f"{name} on {options.device}")


def test_a_loader_is_registered_by_a_pattern(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(registry, "LOADERS", {"*.toy": "tests.test_seams:load_toy", **registry.LOADERS})
    model = outpace.load("3.toy", device="moon")
    assert model.name == "3.toy on moon"
    assert model.generate(PROMPT, max_tokens=4).tokens == Model(ToyLM(seed=3)).generate(PROMPT, max_tokens=4).tokens
    # A folder is recognised by a file in it.
    (tmp_path / "toy_model.xml").touch()
    monkeypatch.setattr(registry, "LOADERS", {"toy_model.xml": "tests.test_seams:load_folder", **registry.LOADERS})
    assert outpace.load(tmp_path).name == str(tmp_path)


def load_folder(name: str, options: LoadOptions) -> Model:
    return Model(ToyLM(), name=name)


def test_plain_needs_no_drafting() -> None:
    assert Plain().root(run(Model(ToyLM()), PROMPT, method="plain")).tokens
