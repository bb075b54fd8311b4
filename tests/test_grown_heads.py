"""A grown model generates what the small one does, and its grown heads propose what the small ones do."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import outpace
from outpace import registry
from outpace.api.model import Model
from outpace.core.tree import Tree
from outpace.heads import store
from outpace.heads.base import Head
from tests.benchmark_scripts import script, small_llama
from tests.test_heads import spelled, stirred
from tests.tiny_models import GROUPED, VOCAB, build

PROMPTS = [[1, 2, 3, 1, 2], [9, 8, 7, 6] * 5, [5, 50, 100]]
SAMPLED = {"temperature": 0.8, "seed": 5}
TINY: dict[str, Any] = dict(
    hidden_size=88, intermediate_size=120, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=2,
    head_dim=16, vocab_size=160,
)  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {  # name: settings; the part before "-" is the kind
    "eagle3": dict(layers=2),
    "eagle3-normed": dict(normed=True, taps=[1, 3]),
    "eagle3-joined": dict(entry_norm="joined", residual_norm=True, own_output=True),
    "mtp": dict(),
    "mtp-taps": dict(taps=[1, 2, 3], layers=2, feedforward=40),
    "mtp-target": dict(parts="target"),
    "medusa": dict(),
    "medusa-linked": dict(linked=24, taps=[1, 2, 3]),
    "medusa-rank": dict(rank=6),
    "block": dict(),
    "block-linked": dict(linked=24, steps=5),
}
OPTIONS: dict[str, dict[str, Any]] = {"eagle3": dict(nodes=16), "mtp": dict(depth=5)}


class Pair(NamedTuple):
    """A small model and what was made of it."""

    small: Any
    large: Any
    before: Model
    after: Model


@pytest.fixture(scope="module")
def grown() -> ModuleType:
    return script("grown")


@pytest.fixture(scope="module")
def heads() -> ModuleType:
    return script("grown_heads")


@pytest.fixture(scope="module")
def pair(grown: ModuleType) -> Pair:
    small: Any = build("llama", **GROUPED)
    large = grown.grow(small, grown.large_config(small.config, **TINY), "cpu", torch.float64)
    return Pair(small, large, outpace.wrap(small), outpace.wrap(large))


def small_head(name: str, lm: Any) -> Head:
    ids = torch.arange(0, VOCAB, 2) if name == "eagle3" or "linked" in name else None
    return stirred(store.fresh(name.partition("-")[0], lm, ids, **HEADS[name]))


def proposed(model: Model, kind: str, head: Any, **given: Any) -> tuple[list[list[int]], list[Tree], list[Any]]:
    """Generate, and record the trees of every pass."""
    drafter, trees = registry.method(kind, head=head, **OPTIONS.get(kind, {})), list[Tree]()
    propose = drafter.propose_batch

    def recorded(*asked: Any) -> list[Tree]:
        trees.extend(found := propose(*asked))
        return found

    drafter.propose_batch = recorded  # type: ignore[method-assign]
    done = model.generate(PROMPTS, method=drafter, max_tokens=16, **given)
    return [c.tokens for c in done], trees, [asdict(c.stats) | {"seconds": None} for c in done]


def test_the_model_keeps_its_function(pair: Pair) -> None:
    tokens = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        want, found = (m(tokens, output_hidden_states=True) for m in (pair.small, pair.large))
    assert torch.allclose(found.logits[..., :VOCAB], want.logits, atol=1e-4)
    assert found.logits[..., VOCAB:].max() < -1000  # no small model has these tokens, so nobody may draw them
    for tap, state in enumerate(want.hidden_states):
        other = found.hidden_states[TINY["num_hidden_layers"] if tap == 3 else tap]
        assert torch.allclose(other[..., :32], state, atol=1e-4) and not other[..., 33:].any()
    for given in ({}, SAMPLED):
        want, found = (
            [c.tokens for c in m.generate(PROMPTS, max_tokens=24, **given)] for m in (pair.before, pair.after)
        )
        assert found == want


@pytest.mark.parametrize("given", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_proposes_the_same_trees(name: str, given: dict[str, Any], heads: ModuleType, pair: Pair) -> None:
    small = small_head(name, pair.before.lm)
    large = heads.grow_head(small, pair.before.lm, pair.after.lm)
    kind = small.spec.kind
    (texts, trees, counts), again = (
        proposed(m, kind, h, **given) for m, h in ((pair.before, small), (pair.after, large))
    )
    assert again[0] == texts and again[2] == counts
    assert len(trees) == len(again[1]) and max(map(len, trees)) > 4
    for ours, theirs in zip(again[1], trees, strict=True):
        assert (ours.tokens[0], spelled(ours)) == (theirs.tokens[0], spelled(theirs))


@pytest.mark.parametrize("narrow", [False, True])
def test_sizes_are_those_of_a_head_for_the_large_model(narrow: bool, heads: ModuleType, pair: Pair) -> None:
    for name in HEADS:
        small = small_head(name, pair.before.lm)
        spec = asdict(heads.grow_head(small, pair.before.lm, pair.after.lm, narrow).spec)
        ids = None if small.ids is None else torch.arange(0, VOCAB, 2)
        own = ("feedforward", "linked", "rank", "taps", "draft_vocab", "kind", "shape")
        alike = {k: v for k, v in asdict(small.spec).items() if k not in own} | {k: spec[k] for k in own[:4]}
        fresh = store.fresh(small.spec.kind, pair.after.lm, torch.arange(VOCAB) if ids is None else ids, **alike)
        found = heads.grow_head(small, pair.before.lm, pair.after.lm, narrow)
        assert {n: t.shape for n, t in found.own_tensors().items()} == {
            n: t.shape for n, t in fresh.own_tensors().items()
        }
        widths = [(spec[key], asdict(small.spec)[key]) for key in ("feedforward", "linked", "rank")]
        for width, before in widths[1:]:
            assert width == before if narrow else width >= before * 88 / 32
        assert widths[0][0] == (widths[0][1] or 48 if narrow else 112 if widths[0][1] else 0)


def test_what_cannot_be_grown_is_refused(heads: ModuleType, grown: ModuleType, pair: Pair) -> None:
    for settings in ({"shape": {"head_dim": 16}}, {"parts": "qwen3"}):
        head = store.fresh("eagle3", pair.before.lm, **settings)
        with pytest.raises(ValueError, match="layers like those of their target"):
            heads.grow_head(head, pair.before.lm, pair.after.lm)
    with pytest.raises(ValueError, match="as many key heads"):
        grown.HeadRows(pair.large.config, pair.small.config)
    config = grown.large_config(pair.small.config, **TINY | {"hidden_size": 32})
    with pytest.raises(ValueError, match="larger hidden size"):
        grown.grow(pair.small, config, "cpu", torch.float64)


def test_the_command_writes_a_model_and_heads_that_load(
    grown: ModuleType, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = small_llama(tmp_path / "small").lm
    for kind in store.KINDS:
        store.save(small_head(kind, lm), tmp_path / "heads" / kind, lm)
    monkeypatch.setitem(grown.SHAPES, "tiny", TINY)
    asked = ["grown.py", str(tmp_path / "small"), "--shape", "tiny", "--output", str(tmp_path / "large")]
    asked += ["--small-heads", str(tmp_path / "heads"), "--heads", str(tmp_path / "grown-heads")]
    monkeypatch.setattr("sys.argv", asked)
    grown.main()
    large = outpace.load(str(tmp_path / "large"), device="cpu")
    for kind in store.KINDS:
        done = large.generate([1, 2, 3], method=kind, head=str(tmp_path / "grown-heads" / kind), max_tokens=4)
        assert len(done.tokens) == 4
