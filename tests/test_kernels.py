"""The Triton kernels against plain arithmetic in float64: interpreted on a CPU (see conftest), compiled on a GPU."""

from __future__ import annotations

import math
import random
import runpy
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

pytest.importorskip("triton")

from outpace.models.cache.group import GRAIN
from outpace.models.kernels import (
    attention,
    attention_op,
    linear,
    prompt_attention,
    sample,
    sample_filtered,
    triton_runtime,
)
from outpace.models.kernels.attention import AttentionTiles, KernelRule, PassVisibility
from outpace.models.kernels.linear import Bytes, SharedInputMatrices
from outpace.models.kernels.prompt_attention import PromptTiles
from outpace.models.kernels.triton_runtime import constexpr, jit, tl
from outpace.sampling import noise
from outpace.sampling.sampler import Sampler
from outpace.sampling.settings import Sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]
SPLITS = [None, 1, 5] if DEVICE == "cuda" else [None, 5]  # the usual for a GPU is many, and 1 or 2 here
ERROR = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


# Attention.


def words_of(parents: list[int], count: int) -> list[list[int]]:
    """Ancestors and self of each node, as signed 64-bit words."""
    paths: list[int] = []
    for i, parent in enumerate(parents):
        paths.append(1 << i | (paths[parent] if parent >= 0 else 0))
    split = [[path >> 64 * w & 2**64 - 1 for w in range(count)] for path in paths]
    return [[word - 2**64 if word >> 63 else word for word in row] for row in split]


def scene(
    jobs: list[tuple[int, int, int]], heads: tuple[int, int, int], words: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, PassVisibility]:
    """Jobs of (pending tokens, tree nodes, committed entries): each a chain, and a random tree below it."""
    rng, (of, kv, dim) = random.Random(0), heads
    torch.manual_seed(0)
    room = 64 * words + 8  # after each prefix
    starts = [sum(prefix + room for *_, prefix in jobs[:i]) for i in range(len(jobs))]
    table, bits, positions = [], [], []
    pool = torch.full((sum(prefix + room for *_, prefix in jobs), 3, kv, dim), math.nan)  # what nobody wrote
    for base, (fed, nodes, prefix) in zip(starts, jobs, strict=True):
        parents = [i - 1 if i < fed else rng.randrange(max(fed - 1, 0), i) if i else -1 for i in range(fed + nodes)]
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        table.append([len(bits), fed + nodes, base, prefix])
        bits += words_of(parents, words)
        positions += [prefix + depth for depth in depths]
        pool[base : base + prefix + fed + nodes] = torch.randn(prefix + fed + nodes, 3, kv, dim)
    bits += [[-1] * words] * 2  # two tokens of no job
    positions += [0, 0]
    seen = PassVisibility(*(torch.tensor(part, device=DEVICE) for part in (table, bits, positions)))
    q = torch.randn(len(bits), of, dim).to(DEVICE, dtype)
    pool = pool.to(DEVICE, dtype)
    return q, pool[:, 0], pool[:, 2], seen


def dense(q: Tensor, keys: Tensor, values: Tensor, seen: PassVisibility, rule: KernelRule) -> Tensor:
    """The same, query by query."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    q, keys, values = q.double().cpu(), keys.double().cpu(), values.double().cpu()
    group = q.shape[1] // keys.shape[1]
    for token0, count, base, prefix in seen.jobs.tolist():
        for t in range(token0, token0 + count):
            position = int(seen.positions[t])
            first = max(0, position - rule.window + 1) if rule.window else 0
            index = [base + i for i in range(first, prefix)]
            for w, word in enumerate(seen.bits[t].tolist()):
                index += [base + prefix + 64 * w + j for j in range(64) if word >> j & 1]
            for head in range(q.shape[1]):
                logits = keys[index, head // group] @ q[t, head] * rule.scale
                if rule.softcap:
                    logits = torch.tanh(logits / rule.softcap) * rule.softcap
                sink = [] if rule.sinks is None else [rule.sinks[head].double().cpu()[None]]
                weights = torch.cat([logits, *sink]).softmax(0)[: len(index)]
                out[t, head] = weights @ values[index, head // group]
    return out


CASES: dict[str, dict[str, Any]] = {
    "plain step": {"jobs": [(1, 0, 70)]},
    "chain and tree": {"jobs": [(3, 9, 100)]},
    "no prefix": {"jobs": [(5, 4, 0)]},
    "ragged, empty slots": {"jobs": [(1, 6, 130), (0, 0, 9), (2, 0, 17), (0, 0, 0), (1, 9, 64)]},
    "two words": {"jobs": [(30, 38, 20), (1, 3, 5)], "words": 2, "heads": (2, 1, 16)},
    "top bit": {"jobs": [(64, 0, 3)], "heads": (1, 1, 16)},
    "window": {"jobs": [(2, 7, 150), (1, 3, 10)], "window": 40},
    "soft-cap and sinks": {"jobs": [(1, 7, 50)], "softcap": 5.0, "sinks": True},
    "window and sinks": {"jobs": [(1, 4, 90)], "window": 16, "sinks": True},
    "no groups": {"jobs": [(1, 5, 40)], "heads": (2, 2, 64)},
    "wide groups": {"jobs": [(1, 5, 40)], "heads": (7, 1, 16)},
    "80 dimensions": {"jobs": [(1, 5, 40)], "heads": (2, 1, 80)},
    "128 dimensions": {"jobs": [(1, 5, 40)], "heads": (2, 1, 128)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("name", CASES)
def test_attention(name: str, splits: int | None, dtype: torch.dtype) -> None:
    case = {"heads": (4, 2, 16), "words": 1, "window": 0, "softcap": 0.0, "sinks": False, **CASES[name]}
    q, keys, values, seen = scene(case["jobs"], case["heads"], case["words"], dtype)
    sinks = torch.randn(q.shape[1]).to(DEVICE, dtype) if case["sinks"] else None
    rule = KernelRule(q.shape[2] ** -0.5, case["window"], case["softcap"], sinks)
    config = None if splits is None else AttentionTiles(16, 16 * min(splits, 2), splits)
    found = attention.launch(q, keys, values, seen, rule, config)
    torch.testing.assert_close(found.double().cpu(), dense(q, keys, values, seen, rule), atol=ERROR[dtype], rtol=0)
    assert not found[-2:].any()


PROMPTS: dict[str, dict[str, Any]] = {
    "one prompt": {"jobs": [(70, 0, 0)]},
    "the rest of one": {"jobs": [(37, 0, 50)]},
    "several": {"jobs": [(1, 0, 9), (0, 0, 9), (40, 0, 33), (20, 0, 0)]},
    "window": {"jobs": [(60, 0, 45), (9, 0, 0)], "window": 20},
    "narrow window": {"jobs": [(60, 0, 45)], "window": 3},
    "soft-cap and sinks": {"jobs": [(50, 0, 7)], "softcap": 5.0, "sinks": True},
    "80 dimensions": {"jobs": [(40, 0, 5)], "heads": (2, 2, 80)},
    "wide groups": {"jobs": [(30, 0, 40)], "heads": (7, 1, 16)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tiles", [PromptTiles(16, 16, 4, 2), PromptTiles(32, 16, 4, 2), None], ids=str)
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name: str, tiles: PromptTiles | None, dtype: torch.dtype) -> None:
    case = {"heads": (4, 2, 16), "words": 2, "window": 0, "softcap": 0.0, "sinks": False, **PROMPTS[name]}
    q, keys, values, seen = scene(case["jobs"], case["heads"], case["words"], dtype)
    sinks = torch.randn(q.shape[1]).to(DEVICE, dtype) if case["sinks"] else None
    rule = KernelRule(q.shape[2] ** -0.5, case["window"], case["softcap"], sinks)
    q, seen = q[:-2], seen._replace(bits=seen.bits[:-2], positions=seen.positions[:-2])
    due = dense_prompt(q, keys, values, seen, rule)
    found = prompt_attention.launch(q, keys, values, seen._replace(bits=seen.bits[:0]), rule, tiles)
    torch.testing.assert_close(found.double().cpu(), due, atol=ERROR[dtype], rtol=0)


def dense_prompt(q: Tensor, keys: Tensor, values: Tensor, seen: PassVisibility, rule: KernelRule) -> Tensor:
    """The attention of each token by itself, whose window reaches into the prompt as well."""
    out = []
    for token0, count, base, prefix in seen.jobs.tolist():
        for i in range(count):
            first = max(0, prefix + i - rule.window + 1) if rule.window else 0
            alone = torch.tensor([[0, 1, base + first, prefix + i - first]], device=DEVICE)
            one = PassVisibility(alone, torch.ones(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
            out.append(dense(q[token0 + i :][:1], keys, values, one, rule._replace(window=0)))
    return torch.cat(out)


@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("prefix", [190, 191, 257])
def test_kernels_read_nothing_that_a_window_has_left(prefix: int, tile: int) -> None:
    """A slot's region begins shortly before its window, and the place of entry 0 is before the pool."""
    window, rule = 40, KernelRule(0.25, 40)
    first = (prefix - window + 1) // GRAIN * GRAIN  # as late as a span may begin
    kernels: list[Any] = [
        (attention, (2, 7, prefix), dense, AttentionTiles(16, tile, 2)),
        (prompt_attention, (60, 0, prefix), dense_prompt, PromptTiles(16, tile, 4, 2)),
    ]
    for kernel, job, due, cut in kernels:
        q, keys, values, seen = scene([job], (4, 2, 16), 1, torch.float32)
        table = seen.jobs - torch.tensor([0, 0, first, 0], device=DEVICE)
        q, seen = q[:-2], PassVisibility(table, seen.bits[:-2], seen.positions[:-2])
        keys[:first], values[:first] = math.nan, math.nan  # lies before the pool
        keys, values = keys[first:], values[first:]
        given = seen if kernel is attention else seen._replace(bits=seen.bits[:0])
        found = kernel.launch(q, keys, values, given, rule, cut)
        torch.testing.assert_close(found.double().cpu(), due(q, keys, values, seen, rule), atol=2e-5, rtol=0)


def test_attention_keeps_what_is_not_a_number() -> None:
    q, keys, values, seen = scene([(1, 2, 40), (1, 2, 40)], (2, 1, 16), 1, torch.float32)
    keys[5] = math.nan
    found = attention_op.attend(q, keys, values, seen, KernelRule(0.25))
    assert found[:3].isnan().all() and found[3:].isfinite().all()


def test_attention_of_a_token_that_sees_nothing() -> None:
    q, keys, values, seen = scene([(2, 0, 0)], (2, 1, 16), 1, torch.float32)
    seen.bits[1] = 0
    assert not attention_op.attend(q, keys, values, seen, KernelRule(0.25))[1].any()
    with pytest.raises(ValueError):
        attention_op.attend(q.double(), keys.double(), values.double(), seen, KernelRule(0.25))


def test_attention_plans_follow_shapes() -> None:
    q, pool = torch.empty(64, 32, 128, dtype=torch.bfloat16), torch.empty(2**12, 8, 128, dtype=torch.bfloat16)
    assert attention.plan(q, pool, 1).block_m == 64 and attention.plan(q[:1], pool, 1).block_m == 16
    assert attention.plan(q, pool[:20], 1).splits == 1
    assert attention.plan(q, pool.expand(4, -1, -1, -1).flatten(0, 1), 1).block_m == 128  # long texts, read less often
    assert attention.plan(q[:1], pool, 2) == attention.plan(q[:1], pool, 1)  # one of two jobs may be empty


def test_attention_leaves_its_counters_as_they_were() -> None:
    scenes = [([(1, 2, 50)], (4, 2, 16)), ([(9, 20, 33), (1, 0, 90)], (4, 1, 16)), ([(1, 0, 3)], (2, 2, 80))]
    cuts = [
        AttentionTiles(16, 16, 2),
        AttentionTiles(128, 32, 9),
        AttentionTiles(32, 16, 3),
        AttentionTiles(16, 64, 17),
        AttentionTiles(64, 16, 1),
    ]
    for (jobs, heads), cut in zip(scenes + scenes[:2], cuts, strict=True):  # one after the other, in one workspace
        q, keys, values, seen = scene(jobs, heads, 1, torch.float32)
        found = attention.launch(q, keys, values, seen, KernelRule(0.25), cut)
        torch.testing.assert_close(
            found.double().cpu(), dense(q, keys, values, seen, KernelRule(0.25)), atol=2e-5, rtol=0
        )
        assert torch.equal(found, attention.launch(q, keys, values, seen, KernelRule(0.25), cut))
        assert not triton_runtime.counters(q.device, 1).any()


def test_attention_of_no_job_is_zero_wherever_its_tokens_are() -> None:
    for splits in (1, 3):
        q, keys, values, seen = scene([(2, 3, 20), (9, 0, 7), (1, 2, 40)], (4, 1, 16), 1, torch.float32)
        seen.jobs[1] = 0  # its nine tokens are between those of others, and one job less needs all tiles
        found = attention.launch(q, keys, values, seen, KernelRule(0.25), AttentionTiles(16, 16, splits))
        torch.testing.assert_close(
            found.double().cpu(), dense(q, keys, values, seen, KernelRule(0.25)), atol=2e-5, rtol=0
        )
        assert not found[5:14].any() and found[:5].any() and found[14:17].any()
        one = PassVisibility(seen.jobs[:1], *seen[1:])
        assert not attention.launch(q, keys, values, one, KernelRule(0.25), AttentionTiles(16, 16, splits))[5:].any()


@pytest.mark.skipif(DEVICE == "cuda", reason="only the interpreter has an order")
def test_who_arrives_last_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import interpreter_builder as builder

    args, (x, weights) = (
        scene([(1, 6, 150), (2, 0, 30)], (4, 2, 16), 1, torch.float32),
        rows_of(3, 96, [40, 7], torch.float32),
    )

    def run() -> list[Tensor]:
        mixed = attention.launch(*args, KernelRule(0.25), AttentionTiles(16, 16, 5))
        given_ = SharedInputMatrices(weights, [], [x[0, :40], None])
        return [mixed, *linear.launch(x, given_, linear.LinearTiles(16, 16, 4))]

    want, place = run(), type(builder).set_grid_idx

    def backwards(self: Any, *at: int) -> None:
        place(self, *(n - 1 - i for i, n in zip(at, self.grid_dim, strict=True)))

    monkeypatch.setattr(type(builder), "set_grid_idx", backwards)
    assert all(torch.equal(a, b) for a, b in zip(run(), want, strict=True))
    assert not triton_runtime.counters(x.device, 1).any()


# Linear.


def rows_of(t: int, k: int, sizes: list[int], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(t)
    x = torch.randn(t, k).to(DEVICE, dtype)
    return x, [(torch.randn(n, k) * k**-0.5).to(DEVICE, dtype) for n in sizes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", [None, linear.LinearTiles(16, 32), linear.LinearTiles(32, 16, 3)], ids=str)
@pytest.mark.parametrize(
    ("t", "k", "sizes"),
    [(1, 64, [48]), (3, 40, [33, 7]), (8, 96, [64, 16, 16]), (17, 70, [1, 50, 3, 20]), (64, 33, [40])],
)
def test_linears(t: int, k: int, sizes: list[int], config: linear.LinearTiles | None, dtype: torch.dtype) -> None:
    x, weights = rows_of(t, k, sizes, dtype)
    biases = [torch.randn(n).to(x) if i % 2 == 0 else None for i, n in enumerate(sizes)]
    short = [(w.float() * 127 / w.float().abs().max()).round().to(torch.int8) for w in weights]
    scales = [(0.5 + torch.rand(n).to(DEVICE)) * k**-0.5 / 40 for n in sizes]
    for given_ in (SharedInputMatrices(weights, [], biases), SharedInputMatrices(short, scales, biases)):
        found = linear.launch(x, given_, config)
        for i, (out, w, b) in enumerate(zip(found, given_.weights, biases, strict=True)):
            want = x.double() @ w.double().T * (given_.scales[i].double() if given_.scales else 1)
            want += 0 if b is None else b.double()
            torch.testing.assert_close(out.double(), want, atol=ERROR[dtype], rtol=ERROR[dtype])


@pytest.mark.parametrize("rows", [1, 64])  # which are widened in different ways
def test_every_int8_number_is_itself(rows: int) -> None:
    every = torch.arange(-128, 128, dtype=torch.int8, device=DEVICE)
    x = torch.eye(rows, 64, device=DEVICE)
    matrix = every.repeat(64, 1).T.contiguous()  # [256, 64]
    (found,) = linear.linears(x, [matrix], [torch.ones(256, device=DEVICE)], [None])
    assert torch.equal(found, every.float().expand(rows, 256))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("split", [1, 2])
def test_a_row_does_not_depend_on_the_others(split: int, dtype: torch.dtype) -> None:
    x, weights = rows_of(16, 96, [40, 24], dtype)
    config = linear.LinearTiles(16, 32, split)
    whole = linear.launch(x, SharedInputMatrices(weights, [], [None, None]), config)
    for t in (1, 3, 8, 15):
        part = linear.launch(x[:t], SharedInputMatrices(weights, [], [None, None]), config)
        assert all(torch.equal(a, b[:t]) for a, b in zip(part, whole, strict=True))
    strided = torch.cat([x, x], 1)[:, :96]
    first, second = (linear.linears(given_, weights, [], [None, None])[0] for given_ in (strided, x))
    assert torch.equal(first, second)


def test_linears_leave_their_counters_as_they_were() -> None:
    first = triton_runtime.counters(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE), 1)
    for _ in range(2):  # shapes and splits one after the other, in one workspace
        for t, k, sizes, split in (
            (1, 96, [50, 20], 3),
            (20, 40, [33], 2),
            (3, 200, [70], 8),
            (1, 64, [9], 4),
            (3, 33, [8], 5),
        ):
            x, weights = rows_of(t, k, sizes, torch.float32)
            biases = [w[:, 0].contiguous() for w in weights]
            found = linear.launch(x, SharedInputMatrices(weights, [], biases), linear.LinearTiles(16, 16, split))
            for out, w, b in zip(found, weights, biases, strict=True):
                torch.testing.assert_close(out, x @ w.T + b, atol=2e-5, rtol=2e-5)
            again = linear.launch(x, SharedInputMatrices(weights, [], biases), linear.LinearTiles(16, 16, split))
            assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
            assert triton_runtime.counters(x.device, 1) is first and not first.any()


def test_counters_grow_and_the_old_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runtime, "_COUNTERS", {})
    device = torch.device(DEVICE)
    few, many = triton_runtime.counters(device, 5), triton_runtime.counters(device, 2**15 + 1)
    assert len(few) < len(many) and not few.any() and not many.any()
    assert (
        triton_runtime.counters(device, 5) is many and triton_runtime._COUNTERS[device][0] is few
    )  # a graph may hold it


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)])
def test_the_tiles_depend_on_the_rows_by_their_bucket(n: int, k: int) -> None:
    assert len({linear.choose(n, k, t) for t in range(1, 17)}) == 1
    assert len({linear.choose(n, k, t) for t in range(33, 65)}) == 1
    for t, size in product((1, 17, 64, 128), (Bytes(), Bytes(1, 2), Bytes(1, 4), Bytes(4, 4))):
        c = linear.choose(n, k, t, size)
        tile = (c.block_n * size.matrix + linear.bucket(t) * size.row) * c.block_k
        assert c.stages >= 2 and c.stages * tile < 227 * 2**10


def test_linears_refuse_what_does_not_fit() -> None:
    x, (w,) = rows_of(4, 32, [16], torch.float32)
    for given_ in ([w.double()], [w[:, :8]], [w.T], [w] * 5, []):
        with pytest.raises(ValueError):
            linear.linears(x, given_, [], [None] * len(given_))
    with pytest.raises(ValueError):
        linear.linears(x, [w], [], [torch.zeros(3).to(x)])
    short, scale = w.to(torch.int8), torch.ones(16, device=DEVICE)
    for wrong in ([], [scale[:3]], [scale.double()], [scale, scale]):
        with pytest.raises(ValueError):
            linear.linears(x, [short], wrong, [None])
    with pytest.raises(ValueError):
        linear.linears(x, [w], [scale], [None])


def test_many_rows_go_to_the_library() -> None:
    x, (w,) = rows_of(linear.MOST_ROWS + 1, 32, [16], torch.float32)
    torch.testing.assert_close(linear.linears(x, [w], [], [None]), [x @ w.T])


def test_many_rows_of_int8_matrices_are_several_launches() -> None:
    x, (w,) = rows_of(linear.MOST_ROWS + 5, 32, [16], torch.float32)
    short, scale = (w * 100).round().to(torch.int8), torch.full([16], 0.01, device=DEVICE)
    found = linear.linears(x, [short], [scale], [None])
    torch.testing.assert_close(found, [x @ short.float().T * scale], atol=2e-5, rtol=2e-5)


# Choice.


def words_at(seed: int, positions: list[int]) -> Tensor:
    return torch.tensor([noise.keys(seed, position, 0) for position in positions], device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *DTYPES[1:]], ids=str)
@pytest.mark.parametrize("vocab", [5, 300])
def test_choice_is_the_samplers(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    temperatures = [0.0, 0.3, 0.7, 1.7, 100.0]
    logits = (torch.randn(len(temperatures), vocab) * 3).to(DEVICE, dtype)
    logits[:, 1] = -torch.inf
    heat = torch.tensor(temperatures, device=DEVICE, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for seed in (0, 2**40 + 7):
        positions = [seed % 11 + i for i in range(len(temperatures))]
        tokens, best, prob, sure = sample.launch(logits, words_at(seed, positions), heat, block=64)
        samplers = [Sampler(Sampling(temperature=t, seed=seed)) for t in temperatures]
        want = [s.choose(row, [0] * p) for s, row, p in zip(samplers, logits, positions, strict=True)]
        assert tokens.tolist() == want
        assert torch.equal(best, logits.max(1).values.float()) and sure.all()
        distributions = [s.process(row, [0]).double().softmax(0) for s, row in zip(samplers, logits, strict=True)]
        held = torch.stack([distribution[token] for distribution, token in zip(distributions, want, strict=True)])
        torch.testing.assert_close(prob.double(), held, atol=1e-5, rtol=1e-4)


@jit
def _rough(hashed, found, BLOCK: constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    bits = tl.load(hashed + at).to(tl.uint32)
    tl.store(found + at, sample._rough_gumbel(bits, tl.zeros([BLOCK], tl.float32)))


def test_rough_noise_is_close_to_the_noise() -> None:
    """Near both ends, where it is largest and smallest, and where the series ends."""
    steps = torch.arange(1024, dtype=torch.int64)
    edge = int(2**32 * 0.996)
    bits = torch.cat([steps, 2**32 - 1 - steps, edge - 512 + steps, steps * (2**22 - 1)]).to(DEVICE)
    found = torch.empty(len(bits), device=DEVICE)
    _rough[(1,)](bits, found, BLOCK=len(bits))
    exact = -torch.log(-torch.log((bits.double() + 0.5) / 2**32))
    torch.testing.assert_close(found.double(), exact, atol=5e-4, rtol=0)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(1, 90))
def test_the_noise_is_that_of_the_library(seed: int, position: int, vocab: int) -> None:
    logits = torch.zeros(1, vocab, device=DEVICE)  # the noise alone chooses
    tokens, *_ = sample.launch(logits, words_at(seed, [position]), torch.ones(1, device=DEVICE), block=32)
    assert int(tokens) == int(noise.gumbel(torch.arange(vocab), seed, position).argmax())


def test_choice_takes_the_first_of_equals_and_tells_what_is_not_finite() -> None:
    logits = torch.zeros(5, 100, device=DEVICE)
    logits[0, 70] = logits[0, 40] = 1
    logits[1, 3] = math.nan
    logits[2, 99] = math.inf
    logits[3] = -math.inf
    words, heat = words_at(0, [0] * 5), torch.tensor([0, 1, 0, 1, 0.0], device=DEVICE)
    tokens, best, *_ = sample.launch(logits, words, heat, block=32)
    assert tokens[0] == 40 and best[0] == 1 and tokens[4] == 0 and best[4] == 0
    assert not best[1:4].isfinite().any()
    assert (tokens >= 0).all() and (tokens < 100).all()


FILTERS: list[dict[str, Any]] = [
    {"top_k": 1}, {"top_k": 5}, {"top_k": 40}, {"top_p": 0.02}, {"top_p": 0.5}, {"top_p": 0.9}, {"min_p": 0.1},
    {"min_p": 1.0}, {"typical_p": 0.2}, {"typical_p": 0.95}, {"top_k": 20, "top_p": 0.8}, {"top_p": 0.7, "min_p": 0.05},
    {"top_k": 9, "top_p": 0.6, "min_p": 0.2}, {"top_p": 0.9, "min_p": 0.02, "typical_p": 0.7}, {},
]  # fmt: skip
NAMES = ("top_k", "top_p", "min_p", "typical_p")
HALVES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def limits_of(settings: list[dict[str, Any]]) -> Tensor:
    return torch.tensor([[float(s.get(name, 0)) for s in settings] for name in NAMES], device=DEVICE).double()


def kept_choices(
    logits: Tensor, settings: list[dict[str, Any]], temperatures: list[float], seed: int, block: int = 64
) -> Tensor:
    """The kernels' choices; those that they are sure of are the sampler's."""
    rows = range(len(settings))
    words = torch.cat([words_at(seed, [row]) for row in rows])
    heat = torch.tensor(temperatures, dtype=torch.float64, device=DEVICE)
    found = sample_filtered.launch(logits, words, heat, limits_of(settings), block)
    assert torch.equal(found[1].float(), logits.amax(1).float())
    for row, (token, _, prob, sure) in zip(rows, found.T.tolist(), strict=True):
        if sure:
            sampler = Sampler(Sampling(temperature=temperatures[row], seed=seed, **settings[row]))
            assert token == sampler.choose(logits[row], [0] * row), settings[row]
            due = logits[row].float().softmax(-1) if sampler.greedy else sampler.distribution(logits[row], [0])
            assert prob > float(due[int(token)]) * (1 - 1e-4) - 1e-6  # without tokens that rounding may decide
    return found


@pytest.mark.parametrize("temperature", [0.5, 1.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_choice_among_what_filters_leave_is_the_samplers(dtype: torch.dtype, temperature: float) -> None:
    torch.manual_seed(1)
    given = [*FILTERS, {}]
    logits = torch.stack([torch.randperm(150) / 8 - 9 for _ in given])
    logits = (logits + (torch.rand(len(given), 150) / 16 if dtype == torch.float32 else 0)).to(DEVICE, dtype)
    logits[:, 3] = -torch.inf
    found = kept_choices(logits, given, [*[temperature] * len(FILTERS), 0.0], seed=5)
    assert found[3].all()
    assert found[0, -1] == logits[-1].argmax()  # a greedy row among the others
    samplers = [Sampler(Sampling(temperature=temperature, **settings)) for settings in FILTERS]
    due = [s.distribution(row, [0])[int(token)] for s, row, token in zip(samplers, logits, found[0], strict=False)]
    torch.testing.assert_close(found[2, :-1], torch.stack(due), atol=1e-5, rtol=1e-4)


rows_of_filters = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "top_k": st.sampled_from([1, 2, 20, 90, 1000]),
            "top_p": st.sampled_from([1e-6, 0.3, 0.9, 0.999, 0.9999999]),
            "min_p": st.sampled_from([1e-3, 0.3, 1.0]),
            "typical_p": st.sampled_from([0.01, 0.5, 0.95, 0.999]),
        },
    ),
    min_size=5,
    max_size=5,
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    given=rows_of_filters,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.9]),
    vocab=st.sampled_from([3, 64, 150, 300]),
    dtype=HALVES,
    spread=st.sampled_from([0.0, 0.05, 1.0, 4.0, 40.0]),
    step=st.sampled_from([0.0, 0.25]),
    seed=st.integers(0, 2**40),
)
def test_filtered_choices_are_the_samplers_or_unsure(
    given: list[dict[str, Any]],
    temperature: float,
    vocab: int,
    dtype: torch.dtype,
    spread: float,
    step: float,
    seed: int,
) -> None:
    logits = torch.randn(len(given), vocab, generator=torch.Generator().manual_seed(seed)) * spread + seed % 3 * 10
    logits = (logits / step).round() * step if step else logits
    logits[1::2, 1:] = logits[1::2, 1:].masked_fill(torch.rand(vocab - 1) < 0.5, -torch.inf)
    logits[4, 1:] = -torch.inf  # a single token is allowed
    found = kept_choices(logits.to(DEVICE, dtype), given, [temperature] * len(given), seed, 128)
    assert found[0, 4] == 0
    assert found[3].sum() > 2


@pytest.mark.parametrize(
    "given",
    [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.3}, {"typical_p": 0.9}, {"top_k": 100, "top_p": 0.9, "typical_p": 0.9}],
)
def test_choices_from_flat_and_peaked_rows_are_sure(given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    flat = torch.randn(24, 500) * 0.3
    peaked = torch.randn(8, 500) + 20 * torch.nn.functional.one_hot(torch.arange(8) * 60, 500)
    logits = torch.cat([flat, flat[:6].bfloat16().float(), torch.zeros(2, 500), peaked]).to(DEVICE)
    found = kept_choices(logits, [given] * len(logits), [1.0] * len(logits), seed=3, block=256)
    assert found[3].all()


def test_a_choice_that_rounding_may_decide_is_unsure() -> None:
    logits = torch.zeros(24, 100, device=DEVICE)
    logits[:, 50:] = -1e-3
    edge = float(torch.softmax(logits[0].double(), -1)[:50].sum())  # the last token of the first half reaches it
    sure = [kept_choices(logits, [{"top_p": edge + shift}] * 24, [1.0] * 24, 7, 128)[3] for shift in (-1e-4, 0.0, 1e-4)]
    assert sure[0].all() and sure[2].all()
    assert 3 < sure[1].sum() < 21  # where a token of the first half has the best score of all, it is sure


def test_other_rows_change_no_bit_of_a_choice() -> None:
    torch.manual_seed(2)
    logits, count = torch.randn(len(FILTERS), 200, device=DEVICE), len(FILTERS)
    words, heat = words_at(1, list(range(count))), torch.ones(count, device=DEVICE).double()
    limits = limits_of(FILTERS)
    together = sample_filtered.launch(logits, words, heat, limits, 64)
    for row in (1, 5, 9, 13):
        part = slice(row, row + 1)
        alone = sample_filtered.launch(logits[part], words[part], heat[part], limits[:, part], 64)
        assert torch.equal(alone[:, 0], together[:, row])


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are compiled")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_interpreter_reduces_at_once_to_what_it_reduces_to_one_by_one(axis: int, keep: bool) -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    xor, bits = tl.standard._xor_combine, torch.randint(-(2**62), 2**62, (2, 8, 4)).numpy()
    scope = interpreter._patch_lang(xor.fn)
    try:
        given = (tl.tensor(interpreter.TensorHandle(bits, tl.int64), tl.block_type(tl.int64, [2, 8, 4])),)
        reduce = interpreter.ReduceOps(axis, xor, keep)
        (due,), found = reduce.generic_reduce(given), reduce.apply_impl(given)
    finally:
        scope.restore()
    assert (found.handle.data == due.handle.data).all() and found.handle.data.dtype == due.handle.data.dtype
    assert (found.shape, found.dtype) == (due.shape, due.dtype)


def test_logits_that_cannot_be_chosen_from_are_told_with_filters_too() -> None:
    logits = torch.zeros(4, 100, device=DEVICE)
    logits[0, 3], logits[1, 7], logits[2], logits[3, 9] = math.nan, math.inf, -math.inf, math.inf
    limits = limits_of([{"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}, {"typical_p": 0.5}])
    tokens, best, *_ = sample_filtered.launch(logits, words_at(0, [0] * 4), torch.ones(4, device=DEVICE), limits, 32)
    assert not best.isfinite().any() and (tokens >= 0).all() and (tokens < 100).all()


def test_operators_are_well_formed() -> None:
    q, keys, values, seen = scene([(1, 2, 20)], (2, 1, 16), 1, torch.float32)
    x, weights = rows_of(3, 32, [16, 8], torch.float32)
    choice = x, words_at(0, [0, 1, 2]), torch.ones(3, device=DEVICE)
    cases: dict[Any, tuple[Any, ...]] = {
        torch.ops.outpace.attend: (q, keys.nan_to_num(), values.nan_to_num(), list(seen), None, [0.25, 0.0, 0.0]),
        torch.ops.outpace.linears: (x, weights, [], [None, None]),
        torch.ops.outpace.choose: choice,
        torch.ops.outpace.choose_kept: (*choice, limits_of([{}] * 3), [0]),
    }
    for op, args in cases.items():
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))


def test_operators_compile_into_one_graph() -> None:
    q, keys, values, seen = scene([(1, 2, 20)], (2, 1, 16), 1, torch.float32)
    _, weights = rows_of(3, 32, [40], torch.float32)

    def step(words: Tensor, heat: Tensor) -> Tensor:
        mixed = attention_op.attend(q, keys, values, seen, KernelRule(0.25)).flatten(1)
        (logits,) = linear.linears(mixed, weights, [], [None])
        return sample.choose(logits, words, heat)[0]

    args = words_at(0, list(range(5))), torch.ones(5, device=DEVICE)
    assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(*args), step(*args))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_operators_are_captured() -> None:
    q, keys, values, seen = scene([(1, 6, 300)], (8, 2, 64), 1, torch.float32)
    x, weights = rows_of(8, 512, [96, 32], torch.float32)
    args = torch.randn(8, 5000, device=DEVICE), words_at(0, list(range(8))), torch.ones(8, device=DEVICE)

    def step() -> list[Tensor]:
        mixed = attention_op.attend(q, keys, values, seen, KernelRule(0.125))
        return [mixed, *linear.linears(x, weights, [], [None, None]), *sample.choose(*args)]

    want, graph = step(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_benchmark_reads_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "kernel_times.py"
    module = SimpleNamespace(**runpy.run_path(str(path)))
    options = module.parse(["--quick", "--seconds", "5", "--only", "linear"])
    assert (options.quick, options.seconds, options.only) == (True, 5, "linear")
    with pytest.raises(SystemExit):
        module.parse(["--nonsense"])
    for sizes, k in module.SHAPES.values():
        for bucket in module.BUCKETS:
            quick, full = (module.grid(sum(sizes), k, bucket, quick) for quick in (True, False))
            assert quick == full[: module.QUICK] and len(set(full)) == len(full) < 200
    if DEVICE == "cpu":
        assert module.main(["--quick"]) == 1 and "GPU" in capsys.readouterr().out
