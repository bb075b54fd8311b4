"""Triton kernel for linear layers on a few rows of input, near the speed at which the weights can be read.

Several matrices with the same input run in one launch, and none is copied. The weight matrix is the tall operand of the
matrix unit, since a few rows of input would leave that side almost empty. The bits of a row's result depend on the
number of rows only through `bucket`. int8 matrices have a scale per row and are widened on the way to the matrix unit.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outpace.models.kernels.triton_runtime import (
    DTYPES,
    H200,
    Machine,
    begin,
    constexpr,
    counters,
    early,
    jit,
    machine,
    power,
    tl,
)

MOST_ROWS, MOST_MATRICES = 128, 4
# Bits of the float 2**23 + 128. XOR with an int8 in the last byte flips the sign bit of the int8 and adds its value.
# It is a kernel argument, because the tile is laid out differently if the compiler knows it, and that was not timed.
LOWEST = 0x4B000080


@dataclass(frozen=True)
class LinearTiles:
    """Matrix rows and columns of a tile, programs along the columns, warps, and tiles in flight at a time."""

    block_n: int
    block_k: int
    split_k: int = 1
    warps: int = 4
    stages: int = 4


class Bytes(NamedTuple):
    """Bytes per element."""

    matrix: int = 2
    row: int = 2


class SharedInputMatrices(NamedTuple):
    """Matrices with the same input. All of them have scales, if they are int8, or none has."""

    weights: list[Tensor]  # [n, k] each
    scales: list[Tensor]  # [n] each, float32
    biases: list[Tensor | None]  # [n] each


def linears(x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    """Compute `x @ w.T * s + b` for each matrix."""  # [rows, k], [n, k] each, [n] each -> [rows, n] each
    return torch.ops.outpace.linears(x, weights, scales, biases)


@torch.library.custom_op(
    "outpace::linears",
    mutates_args=(),
    schema="(Tensor x, Tensor[] weights, Tensor[] scales, Tensor?[] biases) -> Tensor[]",
)
def _linears(x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    given = SharedInputMatrices(weights, scales, biases)
    if x.shape[0] <= MOST_ROWS:
        return launch(x, given)
    if scales:  # widening the weights in memory would take longer than reading them several times
        parts = [launch(part, given) for part in x.split(MOST_ROWS)]
        return [torch.cat(same) for same in zip(*parts, strict=True)]
    return [torch.nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]


@_linears.register_fake
def _(x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
    return [x.new_empty(x.shape[0], w.shape[0]) for w in weights]


def bucket(t: int) -> int:
    """Return the rows of a tile: the rows of `x`, padded with zeros."""
    return max(16, power(t))


def choose(n: int, k: int, t: int, size: Bytes = Bytes(), gpu: Machine = H200) -> LinearTiles:  # noqa: B008
    """Choose the tiles for matrices with `n` rows in all."""
    rows = bucket(t)
    few = rows < 64  # then several programs share a multiprocessor; otherwise the input rows fill its memory
    if size.matrix == 1:
        return _int8_tiles(n, k, rows, size, gpu)
    block_n = 64 if few or gpu.shared < 2**17 or n <= 64 * gpu.processors else 128
    block_k = 256 // size.matrix  # 256 contiguous bytes
    tiles = -(-n // block_n)
    most = min(8, max(1, k // (4 * block_k)))  # a split that ends before its pipeline is full gains nothing
    # One program per multiprocessor has the most reads in flight, unless too many multiprocessors then have none.
    sparse = max(1, gpu.processors // tiles) * tiles < 0.9 * gpu.processors
    tried = (2, 3) if few else (2,) if sparse else (1,)
    cuts = [(together, max(1, min(most, together * gpu.processors // tiles))) for together in tried]
    # Programs that wait for a place, and places without a program, are time in which nothing is read.
    together, split_k = max(cuts, key=lambda cut: min(1.0, tiles * cut[1] / (cut[0] * gpu.processors)))
    room = gpu.shared // together // ((block_n + rows) * 256)
    return LinearTiles(block_n, block_k, split_k, 4 if few else 8, max(2, min(5, room)))


def _int8_tiles(n: int, k: int, rows: int, size: Bytes, gpu: Machine) -> LinearTiles:
    """Choose tiles for int8: small tiles and many programs, some of which read while others widen."""
    few = rows < 64
    block_n = 32 if few else 64 if gpu.shared < 2**17 or n <= 64 * gpu.processors else 128
    tiles = -(-n // block_n)
    long = few and k > 2048 and tiles < 4 * gpu.processors
    block_k = (512 if long else 256) // size.row
    wanted, together = (6, 3) if few else (2, 2)  # programs per multiprocessor, and how many of them run at once
    split_k = max(1, min(8, k // (4 * block_k), wanted * gpu.processors // tiles))
    room = gpu.shared // together // ((block_n + rows * size.row) * block_k)
    return LinearTiles(block_n, block_k, split_k, 4 if block_n <= 64 else 8, max(2, min(6, room)))


def launch(x: Tensor, given: SharedInputMatrices, config: LinearTiles | None = None) -> list[Tensor]:
    """Launch the kernel; `config` overrides the tiles that `choose` gives."""
    (rows, k), sizes = x.shape, [w.shape[0] for w in given.weights]
    _check(x, given)
    outs = [torch.empty(rows, n, dtype=x.dtype, device=x.device) for n in sizes]
    if rows == 0 or sum(sizes) == 0:
        return outs
    size = Bytes(given.weights[0].element_size(), x.element_size())
    c = config or choose(sum(sizes), k, rows, size, machine(x.device))
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles, parts, arrived = sum(-(-n // c.block_n) for n in sizes), None, None
    if c.split_k > 1:
        parts = torch.empty(c.split_k, rows, tiles * c.block_n, dtype=torch.float32, device=x.device)
        arrived = counters(x.device, tiles)
    with torch.cuda.device_of(x):
        _product[(tiles, c.split_k)](
            x, tuple(given.weights), tuple(given.scales or [None] * len(sizes)), tuple(given.biases), tuple(outs),
            tuple(sizes), parts, arrived, rows, k, x.stride(0), LOWEST,
            BT=bucket(rows), BN=c.block_n, BK=c.block_k, SPLIT=c.split_k, EVEN=k % c.block_k == 0,
            num_warps=c.warps, num_stages=c.stages, **early(x.device),
        )  # fmt: skip
    return outs


def _check(x: Tensor, given: SharedInputMatrices) -> None:
    weights, scales, biases = given
    if not 1 <= len(weights) <= MOST_MATRICES or len(biases) != len(weights) or x.shape[0] > MOST_ROWS:
        raise ValueError(
            f"linears takes at most {MOST_ROWS} rows and {MOST_MATRICES} matrices, with a bias or None for each matrix"
        )
    if scales and len(scales) != len(weights):
        raise ValueError("linears takes scales for all matrices or for none")
    expected = torch.int8 if scales else x.dtype
    for w, b in zip(weights, biases, strict=True):
        if w.shape[1] != x.shape[1] or w.dtype != expected or x.dtype not in DTYPES or not w.is_contiguous():
            raise ValueError(
                f"a matrix of shape {tuple(w.shape)} in {w.dtype} does not match the input, or is not contiguous"
            )
        if b is not None and (b.shape != w.shape[:1] or b.dtype != x.dtype or not b.is_contiguous()):
            raise ValueError(
                f"a bias of shape {tuple(b.shape)} in {b.dtype} does not match its matrix, or is not contiguous"
            )
    for w, scale in zip(weights, scales, strict=False):
        if scale.shape != w.shape[:1] or scale.dtype != torch.float32 or not scale.is_contiguous():
            raise ValueError(
                f"scales of shape {tuple(scale.shape)} in {scale.dtype} do not match, or are not contiguous"
            )


@jit
def _product(
    x, weights, scales, biases, outs, sizes, parts, arrived, rows, K, x0, lowest,
    BT: constexpr, BN: constexpr, BK: constexpr, SPLIT: constexpr, EVEN: constexpr,
    EARLY: constexpr,
):  # fmt: skip
    """Multiply one tile of one matrix by all rows, over this program's share of the columns.

    Of the programs that share a tile, the last to arrive adds up what all have stored, in the order of the columns.
    So the order of arrival changes no bit.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    out, n, first = _owner(tile, outs, sizes, BN)
    w, _, _ = _owner(tile, weights, sizes, BN)
    line, row, column = (tile - first) * BN + tl.arange(0, BN), tl.arange(0, BT), tl.arange(0, BK)
    share = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
    start = split * share
    # Matrix rows beyond the end repeat the last one: a load without a mask is a plain copy to shared memory.
    wide = w + tl.minimum(line, n - 1).to(tl.int64)[:, None] * K + (start + column)[None, :]
    tall = x + row[None, :] * x0 + (start + column)[:, None]
    real = (row < rows)[None, :]
    begin(EARLY)
    acc = tl.zeros([BN, BT], tl.float32)
    for at in range(start, tl.minimum(start + share, K), BK):
        if EVEN:
            a = tl.load(wide, eviction_policy="evict_first")
            b = tl.load(tall, mask=real, other=0.0)
        else:
            left = at + column < K
            a = tl.load(wide, mask=left[None, :], other=0.0, eviction_policy="evict_first")
            b = tl.load(tall, mask=left[:, None] & real, other=0.0)
        acc = tl.dot(_widened(a, b.dtype, BT, lowest), b, acc, input_precision="ieee")
        wide += BK
        tall += BK
    place, inside = row[None, :] * n + line[:, None], real & (line < n)[:, None]
    if SPLIT == 1:
        acc = _finished(acc, tile, scales, biases, sizes, BN)
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=inside)
    else:
        whole = tl.num_programs(0) * BN
        part = parts + row[None, :] * whole + (tile * BN + tl.arange(0, BN))[:, None]
        tl.store(part + split * rows * whole, acc, mask=real)
        tl.debug_barrier()  # all threads of the program must have stored before one of them reports it
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1:
            tl.store(arrived + tile, 0)  # reset for the next launch
            full = tl.zeros([BN, BT], tl.float32)
            for i in tl.static_range(SPLIT):  # .cg, since other multiprocessors wrote the parts
                full += tl.load(part + i * rows * whole, mask=real, other=0.0, cache_modifier=".cg")
            full = _finished(full, tile, scales, biases, sizes, BN)
            tl.store(out + place, full.to(out.dtype.element_ty), mask=inside)


@jit
def _owner(tile, given, sizes, BN: constexpr):
    """Return the item of `given` (one per matrix) that a tile belongs to, that matrix's size and its first tile."""
    found, n, first = given[0], sizes[0], tile * 0
    edge = tl.cdiv(sizes[0], BN)
    for i in tl.static_range(1, len(sizes)):
        found = tl.where(tile >= edge, given[i], found)
        n = tl.where(tile >= edge, sizes[i], n)
        first = tl.where(tile >= edge, edge, first)
        edge += tl.cdiv(sizes[i], BN)
    return found, n, first


@jit
def _widened(a, dtype: constexpr, BT: constexpr, lowest):
    """Convert a tile to the dtype of the input rows."""
    if a.dtype == tl.int8 and BT >= 64:
        # The conversion instruction is slow. This way uses shared memory, though, which does not pay for few rows.
        bits = a.to(tl.uint8, bitcast=True).to(tl.int32) ^ lowest
        wide = bits.to(tl.float32, bitcast=True) - 8388736.0
    else:
        wide = a
    return wide.to(dtype)


@jit
def _finished(acc, tile, scales, biases, sizes, BN: constexpr):
    """Apply the matrix's scale and bias to a tile, if it has them."""  # [BN, BT]
    line = tile * BN + tl.arange(0, BN)
    for i in tl.static_range(len(sizes)):
        own = (line >= 0) & (line < sizes[i])  # loaded only by tiles of this matrix
        if scales[i] is not None:
            acc *= tl.load(scales[i] + line, mask=own, other=1.0)[:, None]
        if biases[i] is not None:
            acc += tl.load(biases[i] + line, mask=own, other=0.0).to(tl.float32)[:, None]
        line -= tl.cdiv(sizes[i], BN) * BN
    return acc
