"""The cache against no cache: whatever was scored, kept, copied or cropped, a node's logits are those of its path.

The reference is the Transformers model's own forward over all tokens at once, in float64.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from functools import cache
from itertools import pairwise, product
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outpace import Completion, Model, RequestFailed, wrap
from outpace.core.tree import Tree
from outpace.errors import UsageError
from outpace.models.adapt import adapt
from outpace.models.cache.group import FIRST_CAPACITY, GRAIN
from outpace.models.cache.pool import SCRAP, CacheShape, PoolGroup
from outpace.models.hf.lm import TransformersLM
from outpace.models.hf.snapshot import SnapshotLM
from outpace.models.slots import CHUNK, MAX_DEFERRED, SlotLM

VOCAB = 19
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 8192,
    "initializer_range": 0.3,  # large, so that a wrong key is seen in the logits
    "bos_token_id": None,
    "eos_token_id": None,
}
# A failure is as clear from one random run as from another, so none is shrunk.
steady = settings(derandomize=True, deadline=None, max_examples=10, phases=[Phase.explicit, Phase.generate])
randoms = st.randoms(use_true_random=False)


@cache
def model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "sliding":
        made: PreTrainedModel = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5))
    elif name == "mixed":
        kinds = ["sliding_attention", "full_attention"]
        made = Qwen3ForCausalLM(Qwen3Config(**SIZES, sliding_window=4, use_sliding_window=True, layer_types=kinds))
    else:
        made = LlamaForCausalLM(LlamaConfig(**SIZES))
    for module in [*made.modules()]:
        for child, norm in module.named_children():
            if type(norm).__name__.endswith("RMSNorm"):  # Transformers' own rounds to float32 on the way
                setattr(module, child, nn.RMSNorm(norm.weight.shape[0], eps=1e-6))
    return made.double().eval()


def adapted(name: str) -> SlotLM:
    lm = SnapshotLM(model("native")) if name == "native" else adapt(model(name))
    assert isinstance(lm, SlotLM) and lm.trees == (name != "native")
    return lm


packed = pytest.mark.parametrize("name", ["llama", "sliding", "mixed"])
everywhere = pytest.mark.parametrize("name", ["llama", "sliding", "mixed", "native"])


def reference(name: str, texts: Seq[Seq[int]], taps: Seq[int] = ()) -> list[tuple[Tensor, Tensor | None]]:
    """Logits and hidden states of all tokens of each text, from scratch."""  # [tokens, vocab], [tokens, taps]
    longest = max(len(text) for text in texts)
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])  # what comes after is not seen
    with torch.no_grad():
        out = model(name)(input_ids=ids, use_cache=False, output_hidden_states=bool(taps))
    hidden = torch.cat([out.hidden_states[tap] for tap in taps], dim=-1) if taps else None
    lengths = [len(text) for text in texts]
    return [(out.logits[i, :n], None if hidden is None else hidden[i, :n]) for i, n in enumerate(lengths)]


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


class Checked:
    """An LM beside what it ought to hold; every pass is compared with the reference."""

    def __init__(self, name: str, random: Random, taps: tuple[int, ...] = ()):
        self.name, self.random, self.taps = name, random, taps
        self.lm = adapted(name)
        self.held: dict[int, list[int]] = {}  # row -> committed tokens
        self.trees: dict[int, Tree] = {}  # row -> what was scored last

    def token(self) -> int:
        return self.random.randrange(VOCAB)

    def text(self, length: int) -> list[int]:
        return [self.token() for _ in range(length)]

    def tree(self, most: int = 7) -> Tree:
        tree = Tree([self.token()])
        for _ in range(self.random.randint(0, most)):
            self.sprout(tree)
        return tree

    def sprout(self, tree: Tree) -> None:
        tree.add(self.random.randrange(len(tree)) if self.lm.trees else len(tree) - 1, self.token())

    def path(self, tree: Tree) -> list[int]:
        """From the root down to any node: what a target may accept."""
        return tree.path(self.random.randrange(len(tree)))

    def acquire(self, tokens: list[int]) -> int:
        row = self.lm.acquire(tokens, taps=self.taps)
        assert row not in self.held
        self.feed(row, tokens)
        return row

    def release(self, row: int) -> None:
        self.lm.release(row)
        del self.held[row]
        self.trees.pop(row, None)

    def feed(self, row: int, tokens: list[int]) -> None:
        self.lm.feed([tokens], [row])
        self.held[row] = list(tokens)
        self.trees.pop(row, None)

    def score(self, rows: Seq[int], trees: Seq[Tree], since: Seq[int] | None = None) -> None:
        scores = self.lm.score(trees, rows, since)
        assert len(scores) == len(rows)
        leaves = [(tree, leaf) for tree in trees for leaf in range(len(tree)) if not tree.children(leaf)]
        prefixes = {id(tree): self.held[row] for tree, row in zip(trees, rows, strict=True)}
        texts = [prefixes[id(tree)] + [tree.tokens[node] for node in tree.path(leaf)] for tree, leaf in leaves]
        wanted = reference(self.name, texts, self.taps)
        for i, (row, tree, found) in enumerate(zip(rows, trees, scores, strict=True)):
            first = since[i] if since is not None else 0
            assert found.logits.all().shape == (len(tree) - first, VOCAB)
            self.trees[row] = tree
            for (owner, leaf), (logits, hidden) in zip(leaves, wanted, strict=True):
                if owner is not tree:
                    continue
                new = [(at, node) for at, node in enumerate(tree.path(leaf), len(self.held[row])) if node >= first]
                same(found.logits[[node - first for _, node in new]], logits[[at for at, _ in new]])
                if hidden is not None:
                    assert found.hidden is not None
                    same(found.hidden[[node - first for _, node in new]], hidden[[at for at, _ in new]])

    def keep(self, rows: Seq[int], paths: Seq[list[int]]) -> None:
        self.lm.keep(paths, rows)
        for row, path in zip(rows, paths, strict=True):
            tree = self.trees.pop(row)
            self.held[row] += [tree.tokens[node] for node in path]

    def check(self) -> None:
        """Every row holds its tokens, and a fresh root on each is scored as from scratch."""
        rows = list(self.held)
        self.random.shuffle(rows)
        for row in [*self.trees]:
            self.feed(row, self.held[row])
        if rows:
            self.score(rows, [Tree([self.token()]) for _ in rows])
        for row in rows:
            assert self.lm.slots[row].tokens == self.held[row]
            if self.taps and self.held[row]:
                hidden = self.lm.states.read(row)
                assert hidden is not None
                same(hidden, reference(self.name, [self.held[row]], self.taps)[0][1])
        self.keep(rows, [[] for _ in rows])


def rounds(checked: Checked, rows: Seq[int], count: int) -> None:
    """What the engine does: score a tree on every row, keep a path of each."""
    for _ in range(count):
        trees = [checked.tree() for _ in rows]
        checked.score(rows, trees)
        checked.keep(rows, [checked.path(tree) for tree in trees])


def drafts(checked: Checked, row: int, levels: int) -> list[int]:
    """What a drafter does: score the root, then new nodes on top; gives what the target then committed."""
    tree, since = Tree([checked.token()]), 0
    for level in range(levels):
        if level:
            for _ in range(checked.random.randint(1, 3)):
                checked.sprout(tree)
        if since < len(tree):
            checked.score([row], [tree], [since])
            since = len(tree)
    if checked.random.random() < 0.5:
        checked.sprout(tree)  # proposed, and never scored by the drafter itself
    accepted = [tree.tokens[node] for node in checked.path(tree)]
    return checked.held[row] + accepted + checked.text(checked.random.randint(0, 3))


# Rows


@everywhere
@given(random=randoms)
@steady
def test_score_keep_score_is_a_fresh_prefill(name: str, random: Random) -> None:
    checked = Checked(name, random)
    row = checked.acquire(checked.text(random.randint(0, 9)))
    rounds(checked, [row], 4)
    fresh = Checked(name, random)
    fresh.acquire(checked.held[row])
    tree = checked.tree()
    one, two = checked.lm.score([tree], [row])[0].logits.all(), fresh.lm.score([tree], [0])[0].logits.all()
    same(one, two)


@everywhere
@given(random=randoms)
@steady
def test_ragged_rows_share_a_pass(name: str, random: Random) -> None:
    checked = Checked(name, random)
    rows = [
        checked.acquire(checked.text(random.choice([0, 1, 3, MAX_DEFERRED, MAX_DEFERRED + 1, 30]))) for _ in range(4)
    ]
    for _ in range(3):
        rounds(checked, random.sample(rows, random.randint(1, 4)), 1)
    checked.check()


@everywhere
@given(random=randoms)
@steady
def test_drafters_grow_trees_and_sync_to_what_was_accepted(name: str, random: Random) -> None:
    checked = Checked(name, random)
    row = checked.acquire(checked.text(random.randint(0, 20)))
    for _ in range(4):
        checked.feed(row, drafts(checked, row, random.randint(1, 4)))
    checked.check()


@packed
@given(random=randoms)
@steady
def test_rows_of_a_draft_grow_together(name: str, random: Random) -> None:
    """Each row has its own `since`, and rows drop out as their drafts end."""
    checked = Checked(name, random)
    active = [checked.acquire(checked.text(random.randint(0, 6))) for _ in range(3)]
    trees = {row: Tree([checked.token()]) for row in active}
    since = dict.fromkeys(active, 0)
    while active:
        checked.score(active, [trees[row] for row in active], [since[row] for row in active])
        for row in active:
            since[row] = len(trees[row])
            for _ in range(2):
                checked.sprout(trees[row])
        active = [row for row in active if len(trees[row]) > since[row] and random.random() < 0.7]
    for row, tree in trees.items():
        checked.feed(row, checked.held[row] + [tree.tokens[node] for node in checked.path(tree)])
    checked.check()


@everywhere
@given(random=randoms)
@steady
def test_sync_crops_feeds_and_drops_what_was_provisional(name: str, random: Random) -> None:
    checked = Checked(name, random)
    row = checked.acquire(checked.text(25))
    for _ in range(4):
        if random.random() < 0.5:
            checked.score([row], [checked.tree()])  # provisional: nothing of it is kept, unless it happens to be right
        start = random.randint(0, len(checked.held[row]))
        checked.feed(row, checked.held[row][:start] + checked.text(random.choice([0, 1, 5, MAX_DEFERRED + 3])))
    checked.check()


@everywhere
@given(random=randoms)
@steady
def test_rows_come_and_go_and_share_prefixes(name: str, random: Random) -> None:
    checked = Checked(name, random)
    prompts = [checked.text(20)]
    for _ in range(8):
        if checked.held and random.random() < 0.4:
            checked.release(random.choice(list(checked.held)))
        base = random.choice(prompts)
        prompts.append(base[: random.randint(0, len(base))] + checked.text(random.randint(0, 4)))
        row = checked.acquire(prompts[-1])
        if random.random() < 0.5:
            checked.score([row], [checked.tree()])  # a row that others copy from may have a tree in the air
        else:
            rounds(checked, [row], 1)
        prompts.append(list(checked.held[row]))
    checked.check()
    assert len(checked.lm.slots) <= 9


@packed
def test_a_prefix_that_a_running_row_knows_is_copied_not_computed(name: str) -> None:
    checked = Checked(name, Random(1))
    text = checked.text(40)
    first = checked.acquire(text)
    row = checked.lm.acquire([*text[:30], 1, 2])
    known = 30 if text[30] != 1 else 31
    assert row != first and checked.lm.slots[row].tokens == text[:known]
    checked.held[row] = [*text[:30], 1, 2]
    checked.lm.feed([checked.held[row]], [row])
    checked.check()
    checked.release(first)
    checked.release(row)
    assert checked.acquire([*text[:35], 3]) == first  # a free row that knows the most is taken as it is
    assert checked.lm.slots[first].tokens == text[:35]
    checked.check()


@everywhere
@given(random=randoms)
@steady
def test_hidden_states_follow_the_tokens(name: str, random: Random) -> None:
    checked = Checked(name, random, taps=(0, 1, -1))
    base = checked.text(20)
    rows = [checked.acquire(base[: random.randint(0, 20)] + checked.text(random.randint(0, 3))) for _ in range(3)]
    for _ in range(2):
        rounds(checked, rows[:2], 1)
        checked.feed(rows[2], drafts(checked, rows[2], random.randint(1, 3)))
    checked.release(rows[0])
    checked.acquire(checked.held[rows[1]][: random.randint(0, 20)] + checked.text(2))
    checked.check()


def test_a_row_with_other_taps_is_not_reused() -> None:
    checked = Checked("llama", Random(2))
    text = checked.text(20)
    checked.release(checked.acquire(text))
    checked.taps = (1,)
    checked.acquire([*text, 3])
    checked.check()


@pytest.mark.parametrize("name", ["llama", "sliding"])
def test_long_prompts_run_in_chunks_and_the_cache_grows_under_running_rows(name: str) -> None:
    checked = Checked(name, Random(3))
    first = checked.acquire(checked.text(FIRST_CAPACITY - 3))
    rounds(checked, [first], 3)  # over the first capacity while it runs
    checked.lm.runner.chunk = 100
    rows = [first, *(checked.acquire(checked.text(length)) for length in (2 * FIRST_CAPACITY + 5, 3, MAX_DEFERRED))]
    rounds(checked, rows, 2)
    checked.check()
    assert CHUNK > FIRST_CAPACITY


@everywhere
@given(random=randoms)
@settings(steady, max_examples=10)
def test_everything_in_any_order(name: str, random: Random) -> None:
    checked = Checked(name, random)
    for _ in range(14):
        rows, action = (
            list(checked.held),
            random.choice(["acquire", "round", "round", "draft", "draft", "crop", "release"]),
        )
        if action == "acquire" or not rows:
            base = checked.held[random.choice(rows)] if rows else []
            checked.acquire(base[: random.randint(0, len(base))] + checked.text(random.randint(0, 20)))
        elif action == "round":
            rounds(checked, random.sample(rows, random.randint(1, len(rows))), 1)
        elif action == "draft":
            row = random.choice(rows)
            checked.feed(row, drafts(checked, row, random.randint(1, 4)))
        elif action == "crop":
            row = random.choice(rows)
            checked.feed(row, checked.held[row][: random.randint(0, len(checked.held[row]))])
        else:
            checked.release(random.choice(rows))
    checked.check()


@everywhere
def test_a_second_tree_overwrites_one_that_was_not_kept(name: str) -> None:
    checked = Checked(name, Random(8))
    row = checked.acquire(checked.text(9))
    for length in (4, 2, 1, 3):
        checked.score([row], [Tree.chain(checked.text(length))])
    checked.keep([row], [[0, 1]])
    checked.check()


@everywhere
def test_a_row_released_with_a_tree_in_the_air_forgets_the_tree(name: str) -> None:
    """A request that fails in the middle of a pass leaves its row to the next one that starts alike."""
    checked = Checked(name, Random(5))
    text = checked.text(20)
    row = checked.acquire(text)
    checked.check()
    checked.score([row], [Tree.chain(checked.text(4))])
    checked.release(row)
    assert checked.acquire(text) == row
    checked.check()


@everywhere
def test_a_drafters_row_released_with_its_draft_forgets_it(name: str) -> None:
    checked = Checked(name, Random(6))
    text = checked.text(20)
    row = checked.acquire(text)
    tree = Tree.chain(checked.text(1))
    for since in range(3):
        checked.score([row], [tree], [since])
        tree.add(since, checked.token())
    checked.release(row)
    assert checked.acquire(text) == row
    checked.check()


@everywhere
def test_a_pass_that_ran_out_of_memory_can_be_tried_again(name: str) -> None:
    """As the engine does, with smaller trees: nothing of the pass that failed may be left in a row."""
    checked = Checked(name, Random(7))
    rows = [checked.acquire(checked.text(length)) for length in (4, 20, 9)]
    rounds(checked, rows, 1)
    lm = checked.lm
    ours = lm.twin if isinstance(lm, SnapshotLM) else lm.view
    calls = []

    def fail_once(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:  # in the second layer of the only pass, or in the pass of the second row
            raise torch.OutOfMemoryError("no memory left")

    modules = [ours] if isinstance(lm, SnapshotLM) else list(ours.base_model.layers)
    handles = [module.register_forward_pre_hook(fail_once) for module in modules]
    with pytest.raises(torch.OutOfMemoryError):
        lm.score([Tree.chain(checked.text(3)) for _ in rows], rows)
    for handle in handles:
        handle.remove()
    checked.check()


def test_the_users_model_is_not_touched() -> None:
    ours = model("llama")
    before, implementation = reference("llama", [range(9)])[0][0], ours.config._attn_implementation
    checked = Checked("llama", Random(4))
    rounds(checked, [checked.acquire(checked.text(9))], 2)
    assert ours.config._attn_implementation == implementation
    assert torch.equal(reference("llama", [range(9)])[0][0], before)
    assert isinstance(checked.lm, TransformersLM)
    assert next(checked.lm.view.parameters()).data_ptr() == next(ours.parameters()).data_ptr()


def test_a_model_that_scores_chains_refuses_a_tree() -> None:
    lm = adapted("native")
    row = lm.acquire([1, 2])
    lm.feed([[1, 2]], [row])
    with pytest.raises(UsageError, match="only score chains"):
        lm.score([Tree([1, 2, 3], [-1, 0, 0])], [row])


# A cache that is too small

TOKEN_BYTES = 2 * 2 * 2 * 8 * 8  # keys and values, layers, heads, dimensions, bytes of a float64: of one token
NUMBERS = r"room for \d+ tokens of this request, which needs \d+ \([\d.]+ MiB\); the limit is [\d.]+ MiB"


def small(rows: int, capacity: int = FIRST_CAPACITY) -> Model:
    """A model whose cache may hold this number of slots of this capacity."""
    return wrap(model("llama"), kv_cache_bytes=rows * capacity * TOKEN_BYTES)


def prompt(length: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(length)]


SHORT = [prompt(5, 1), prompt(20, 2), prompt(9, 3)]
OPTIONS: dict[str, Any] = {"method": "ngram", "max_tokens": 12}


@cache
def alone(length: int, seed: int, max_tokens: int = 12) -> list[int]:
    """What a prompt gives when memory does not matter."""
    return wrap(model("llama")).generate(prompt(length, seed), method="plain", max_tokens=max_tokens).tokens


def answers() -> list[list[int]]:
    return [alone(5, 1), alone(20, 2), alone(9, 3)]


def bounded(served: Model) -> bool:
    lm = served.lm
    assert isinstance(lm, TransformersLM) and lm.cache.limit is not None
    return lm.cache.nbytes <= lm.cache.limit


def lengths(found: Seq[Completion]) -> list[str | None]:
    """Why each did not run to its length; None for those that did."""
    return [None if c.finish_reason == "length" else c.error or c.finish_reason for c in found]


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_prompt_that_does_not_fit_fails_alone(place: int) -> None:
    served = small(rows=8)
    found = served.generate([*SHORT[:place], prompt(4000), *SHORT[place:]], **OPTIONS)
    long = found.pop(place)
    assert long.finish_reason == "error" and long.tokens == []
    assert re.search(NUMBERS, long.error)
    assert lengths(found) == [None] * 3
    assert [c.tokens for c in found] == answers()


def test_a_model_goes_on_after_a_prompt_that_did_not_fit() -> None:
    served = small(rows=8)
    with pytest.raises(RequestFailed, match=NUMBERS):
        served.generate(prompt(4000), **OPTIONS)
    assert [served.generate(one, **OPTIONS).tokens for one in SHORT] == answers()
    found = served.generate(SHORT, **OPTIONS)
    assert lengths(found) == [None] * 3
    assert [c.tokens for c in found] == answers()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["long first", "long last"])
def test_a_request_that_outgrows_the_cache_waits_for_the_other(order: tuple[int, int]) -> None:
    """Both fit until one needs more than 256 tokens, which are not there; it goes on when the other is done."""
    served, both = small(rows=2), [prompt(240, 7), prompt(20, 2)]
    found = served.generate([both[i] for i in order], method="ngram", max_tokens=40)
    long, short = (found[order.index(i)] for i in (0, 1))
    assert lengths([short, long]) == [None, None]
    assert short.tokens == alone(20, 2, 40) and long.tokens == alone(240, 7, 40)
    assert bounded(served)


def test_a_request_that_outgrows_the_whole_cache_fails_with_what_it_has() -> None:
    served = small(rows=1)
    [long] = served.generate([prompt(240, 7)], method="ngram", max_tokens=40)
    assert long.finish_reason == "error" and re.search(NUMBERS, long.error)
    assert long.tokens == alone(240, 7, 40)[: len(long.tokens)] and len(long.tokens) >= 15
    assert served.generate(prompt(20, 2), method="plain", max_tokens=40).tokens == alone(20, 2, 40)


def test_more_requests_than_rows_that_fit() -> None:
    served = small(rows=3)
    found = served.generate([*SHORT, *SHORT], **OPTIONS)
    assert lengths(found) == [None] * 6
    assert [c.tokens for c in found] == answers() * 2
    assert bounded(served)


def test_a_long_request_does_not_take_the_room_of_later_ones_for_good() -> None:
    served = small(rows=8)
    assert served.generate(prompt(1500, 5), method="plain", max_tokens=4).tokens == alone(1500, 5, 4)
    found = served.generate(SHORT, **OPTIONS)
    assert lengths(found) == [None] * 3
    assert [c.tokens for c in found] == answers()


@pytest.mark.parametrize("prompts", [[prompt(CHUNK + 40)], SHORT], ids=["long", "many"])
def test_the_limit_holds_from_the_first_pass_on(prompts: list[list[int]]) -> None:
    served = small(rows=1)
    served.generate(prompts, **OPTIONS)
    assert bounded(served)
    served.generate(prompts, **OPTIONS)
    assert bounded(served)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_draft_without_room_costs_speed_and_not_the_answer(rows: int) -> None:
    served = wrap(model("llama"))
    draft = adapt(model("llama"), cache_limit=rows * FIRST_CAPACITY * TOKEN_BYTES)
    prompts = [*SHORT, prompt(700, 4)]
    for _ in range(2):
        found = served.generate(prompts, method="draft", draft=draft, max_tokens=12)
        assert [c.tokens for c in found] == [*answers(), alone(700, 4)]
    assert served.generate(SHORT[0], method="draft", draft=draft, max_tokens=12).tokens == answers()[0]


class Pages:
    """Stands for memory that grows in place, up to a size."""

    def __init__(self, shape: CacheShape, most: int):
        self.whole = torch.zeros(shape.layers, 2, most, shape.heads, shape.dim)
        self.most, self.entries = most, FIRST_CAPACITY

    @property
    def tensor(self) -> Tensor:
        return self.whole[:, :, : self.entries]

    def grow(self, entries: int) -> None:
        if entries > self.most:
            raise torch.OutOfMemoryError("no pages left")
        self.entries = max(self.entries, entries)

    def shrink(self, entries: int) -> None:
        self.entries = entries


class Pool:
    """A pool beside what its slots ought to hold: entry `e` of slot `s` is 1000 s + e."""

    def __init__(self, pages: int | None, window: int | None):
        shape = CacheShape(2, 1, 4, torch.float32)
        self.pages, self.group = pages, PoolGroup([3, 5], window, shape, torch.device("cpu"), None)
        if pages is not None:
            self.group.memory = Pages(shape, pages)  # type: ignore[assignment]
            self.group.pool = self.group.memory.tensor  # type: ignore[union-attr]
            self.group.sides = self.group._sides()
        self.held: dict[int, int] = {}
        self.known = self.group.generation, self.group.size

    def extend(self, slot: int, count: int) -> None:
        group, start = self.group, self.held.get(slot, 0)
        want = group.want(slot, start, start + count)
        try:
            if want is not None:
                group.place(slot, want, None)
        except torch.OutOfMemoryError:
            assert want is not None and self.pages is not None
            assert group.others(slot) + want.least > self.pages - GRAIN  # only where it does not fit
            return
        self.held[slot] = start + count
        first = group.spans[slot].first
        for layer, sign in product(range(2), (1, -1)):
            new = sign * (1000.0 * slot + torch.arange(start, start + count) + layer / 2)
            group.views(layer, slot)[sign < 0][:, start - first : start + count - first] = new[None, :, None]

    def copy(self, source: int, target: int, length: int) -> None:
        want = self.group.copied(source, target, length)
        try:
            if not self.group.covers(target, want):
                self.group.place(target, want, None)
        except torch.OutOfMemoryError:
            assert self.pages is not None
            return
        self.group.transfer(source, target, want.first, want.least)
        for keys in self.group.sides:
            for sign, side in zip((1, -1), keys, strict=True):  # the copy, renamed
                at = self.group.origin(target) + want.first
                side[at : at + want.least] -= sign * 1000.0 * (source - target)
        self.held[target] = length

    def check(self) -> None:
        group = self.group
        assert group.generation > self.known[0] or group.size == self.known[1]  # graphs are captured again
        self.known = group.generation, group.size
        assert group.spans.keys() == group.bases.keys() == self.held.keys()
        for slot, count in self.held.items():
            span = group.spans[slot]
            first = group.reach(count)
            assert span.first <= first and count <= span.end
            assert group.window is None or span.size <= group.most + 700 + GRAIN  # type: ignore[operator]
            for layer, sign in product(range(2), (1, -1)):
                found = group.views(layer, slot)[sign < 0]
                assert found.shape[1] == span.size
                wanted = sign * (1000.0 * slot + torch.arange(first, count) + layer / 2)
                assert (found[0, first - span.first : count - span.first] == wanted[:, None]).all()
        taken = sorted(group.region(slot) for slot in self.held)
        assert all(a.end <= b.base for a, b in pairwise(taken))
        assert not taken or (taken[0].base >= SCRAP and taken[-1].end <= group.size)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("pages", [None, 1500, 4000])
@settings(max_examples=60, deadline=None)
@given(work=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 700)), max_size=24))
def test_a_pool_that_grows_keeps_what_its_slots_hold(
    pages: int | None, window: int | None, work: list[tuple[int, int]]
) -> None:
    pool = Pool(pages, window)
    at = pool.group.pool.data_ptr()
    for slot, count in work:
        if count == 0:
            pool.group.forget(slot)
            pool.held.pop(slot, None)
        elif count == 1:
            assert pool.group.trim() == (pool.known[1] > pool.group.used)
        elif count < 20 and slot + 1 in pool.held:  # of the other slot, what it can be cut back to
            length = max(pool.held[slot + 1] - count, 0)
            if pool.group.reaches(slot + 1, length):
                pool.copy(slot + 1, slot, length)
        else:
            pool.extend(slot, count)
        pool.check()
    assert pages is None or pool.group.pool.data_ptr() == at
