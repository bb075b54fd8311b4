"""Kernel benchmark: how close the kernels come to the memory bandwidth over a grid of tile sizes, and the best sizes.

    python benchmarks/kernel_times.py --quick

Times are from CUDA graphs of several launches over different copies of the data, so that neither the launches nor the
L2 cache affect them. GB/s counts the fewest bytes that must be read; % is relative to the bytes per second of a plain
copy, read and written, in the same run. Tiles are tuned for the most rows of a bucket, and used for the whole bucket.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from outpace.models.kernels import attention, linear
from outpace.models.kernels.linear import LinearTiles, SharedInputMatrices

Calls = list[Callable[[], object]]
SHAPES = {
    "qkv": ([4096, 1024, 1024], 4096),
    "o": ([4096], 4096),
    "gate, up": ([14336, 14336], 4096),
    "down": ([4096], 14336),
    "head": ([128256], 4096),
}
BUCKETS = {16: (1, 8, 16), 64: (64,)}  # rows that share a tile size
HEADS, KV_HEADS, DIM = 32, 8, 128
QUICK = 10  # number of tile sizes in a quick run
COLD = 2**28  # bytes, far more than any L2 cache holds


def say(*cells: object) -> None:
    """Print a line at once, so that an interrupted run has shown results."""
    sys.stdout.write("  ".join(str(cell) for cell in cells) + "\n")
    sys.stdout.flush()


def timed(calls: Calls) -> float:
    """Milliseconds of one of `calls`: the median over replays of a graph of all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    found = []
    for i in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            found.append(start.elapsed_time(end) / len(calls))
    del kept
    return statistics.median(found)


def tried(calls: Calls) -> float:
    """Like `timed`, but infinite if the tiles do not fit the machine."""
    try:
        return timed(calls)
    except Exception as error:
        if "out of resource" not in str(error).lower():
            raise
        return float("inf")


def copy_speed() -> float:  # bytes per millisecond
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * 2**30 / timed([lambda: b.copy_(a)] * 4)


def speed(size: int, ms: float, copy: float) -> str:
    return f"{ms:8.4f} ms {size / ms / 1e6:6.0f} GB/s {100 * size / ms / copy:4.0f} %"


# Linear.


def grid(n: int, k: int, t: int, quick: bool) -> list[LinearTiles]:
    """Tile sizes worth trying: they fit, fill the GPU, and keep enough bytes in flight. The default comes first."""
    rows, found = linear.bucket(t), []
    sizes = itertools.product((16, 32, 64, 128), (64, 128, 256), (1, 2, 4), (4, 8), (3, 4, 5, 6))
    for block_n, block_k, split, warps, stages in sizes:
        programs = -(-n // block_n) * split
        need = stages * (block_n + rows) * block_k * 2
        if need > 225 * 2**10 or programs < 100 or (split > 1 and (programs > 800 or k < 4 * split * block_k)):
            continue
        at_once = min(225 * 2**10 // need, -(-programs // 132), 8)
        if at_once * (stages - 1) * block_n * block_k * 2 >= 2**15 and (warps == 4 or block_n * block_k >= 2**13):
            found.append(LinearTiles(block_n, block_k, split, warps, stages))
    random.Random(0).shuffle(found)
    tiles = [(c.block_n, c.block_k) for c in found]
    turn = {c: tiles[:i].count(tiles[i]) for i, c in enumerate(found)}  # one of each tile size, then the next of each
    usual = linear.choose(n, k, t)
    found = [usual] + [c for c in sorted(found, key=turn.__getitem__) if c != usual]
    return found[:QUICK] if quick else found


def data(sizes: list[int], k: int) -> list[list[Tensor]]:
    """Make enough copies of the matrices that each one leaves the cache before it is used again."""
    copies = max(1, -(-COLD // (2 * k * sum(sizes))))
    make = dict(dtype=torch.bfloat16, device="cuda")
    return [[torch.randn(n, k, **make) * 0.02 for n in sizes] for _ in range(copies)]  # type: ignore[call-overload]


def calls_of(x: Tensor, copies: list[list[Tensor]], config: LinearTiles) -> Calls:
    none: list[Tensor | None] = [None] * len(copies[0])
    turns = copies * max(1, 4 // len(copies))
    return [lambda ws=ws: linear.launch(x, SharedInputMatrices(ws, [], none), config) for ws in turns]  # type: ignore[misc]


def torch_calls(x: Tensor, copies: list[list[Tensor]]) -> Calls:
    turns = copies * max(1, 4 // len(copies))
    return [lambda ws=ws: [torch.nn.functional.linear(x, w) for w in ws] for ws in turns]  # type: ignore[misc]


def linears(copy: float, quick: bool, until: float) -> None:
    parts = [(name, bucket) for name in SHAPES for bucket in BUCKETS]
    for at, (name, bucket) in enumerate(parts):
        sizes, k = SHAPES[name]
        copies, size = data(sizes, k), 2 * k * sum(sizes)
        inputs = {t: torch.randn(t, k, dtype=torch.bfloat16, device="cuda") for t in BUCKETS[bucket]}
        stop = time.perf_counter() + (until - time.perf_counter()) / (len(parts) - at)
        found: dict[LinearTiles, float] = {}
        configs = grid(sum(sizes), k, bucket, quick)
        for config in configs:
            if not found or time.perf_counter() < stop:
                found[config] = tried(calls_of(inputs[bucket], copies, config))
        best, usual = min(found, key=found.__getitem__), configs[0]
        say(f"\n{name}: {sizes} x {k}, <= {bucket} rows, best of {len(found)}/{len(configs)}: {best}; default: {usual}")
        for config in sorted(found, key=found.__getitem__)[:4]:
            say(f"    {found[config]:8.4f} ms", config)
        for t, x in inputs.items():
            times = [timed(torch_calls(x, copies))] + [tried(calls_of(x, copies, c)) for c in (usual, best)]
            lines = (
                f"{who} {speed(size, ms, copy)}" for who, ms in zip(("torch", "default", "best"), times, strict=True)
            )
            say(f"  {t:3} rows:", *lines)
        del copies


# Attention.


def cuts(q: Tensor, pool: Tensor, jobs: int, quick: bool) -> Iterator[attention.AttentionTiles]:
    usual = attention.plan(q, pool, jobs)
    yield usual
    for splits in {max(1, usual.splits // 2), min(64, usual.splits * 2)} - {usual.splits}:
        yield replace(usual, splits=splits)
    if not quick:
        yield replace(usual, stages=4)
        yield replace(usual, block_n=32, stages=4)
        yield replace(usual, warps=12 - usual.warps)
        yield replace(usual, block_m=max(16, usual.block_m // 2))


def pass_of(context: int, tokens: int, batch: int) -> attention.PassVisibility:
    """A pass in which each request has a chain of `tokens` over `context` cache entries."""
    room = context + 64
    jobs = torch.tensor([[b * tokens, tokens, b * room, context] for b in range(batch)], device="cuda")
    words = [(1 << i + 1) - 1 for i in range(tokens)]
    bits = torch.tensor([[w - 2**64 if w >> 63 else w] for w in words] * batch, device="cuda")
    return attention.PassVisibility(jobs, bits, torch.arange(context, context + tokens, device="cuda").repeat(batch))


def attend_calls(
    q: Tensor, pools: list[Tensor], seen: attention.PassVisibility, cut: attention.AttentionTiles
) -> Calls:
    rule = attention.KernelRule(DIM**-0.5)
    return [lambda p=p: attention.launch(q, p[:, 0], p[:, 1], seen, rule, cut) for p in pools]  # type: ignore[misc]


def attentions(copy: float, quick: bool) -> None:
    make = dict(dtype=torch.bfloat16, device="cuda")
    for context, batch in itertools.product((1024, 8192, 32768), (1, 16)):
        size = 4 * batch * context * KV_HEADS * DIM
        copies = max(1, min(64, -(-COLD // size)))
        shape = (batch * (context + 64), 2, KV_HEADS, DIM)
        pools = [torch.randn(shape, **make) for _ in range(copies)]  # type: ignore[call-overload]
        say(f"\nattention: {batch} sequences of {context}, {HEADS} heads, {KV_HEADS} key-value heads, {DIM} dimensions")
        for tokens in (1, 8, 64):
            q = torch.randn(batch * tokens, HEADS, DIM, **make)  # type: ignore[call-overload]
            seen, found = pass_of(context, tokens, batch), {}
            for cut in cuts(q, pools[0][:, 0], batch, quick):
                found[cut] = tried(attend_calls(q, pools * max(1, 4 // copies), seen, cut))
            usual, best = next(iter(found)), min(found, key=found.__getitem__)
            lines = (f"{who} {speed(size, found[c], copy)}" for who, c in (("default", usual), ("best", best)))
            say(f"  {tokens:3} tokens:", *lines, best)
        del pools


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the speed of the kernels with the memory bandwidth.")
    parser.add_argument("--quick", action="store_true", help="try few tile sizes for each shape")
    parser.add_argument("--seconds", type=float, default=120, help="approximate time limit")
    parser.add_argument("--only", choices=("linear", "attention"), help="measure only these kernels")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        say("needs a GPU")
        return 1
    until = time.perf_counter() + options.seconds * (1 if options.only else 0.7)
    copy = copy_speed()
    say(torch.cuda.get_device_name(), f"copies {copy / 1e6:.0f} GB/s")
    if options.only != "attention":
        linears(copy, options.quick, until)
    if options.only != "linear":
        attentions(copy, options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
