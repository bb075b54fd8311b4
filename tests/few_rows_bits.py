"""Compare bits of few_rows.cpp, built for one instruction set, between numbers of rows and of threads.

`python -m tests.few_rows_bits -march=x86-64-v3` prints what differs, one line each. It needs a process of its own,
because torch loads operators once. test_cpu_bits.py runs it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from outpace.models.kernels import cpu
from outpace.storage import native_code

THREADS = (1, 2, 3, 16)
ROWS = 19
# Lengths of sums: less than a vector, whole vectors, and remainders that compilers unroll in different ways.
SUMS, OUTPUTS = (7, 15, 33, 40, 64, 100), (9, 64)
HEADS = ((4, 2, 8), (9, 3, 20), (5, 1, 64), (2, 2, 40))  # query heads, key heads, dimensions
CONTEXT = 21


def products() -> Iterator[tuple[str, Callable[[list[int]], Tensor]]]:
    """Yield products with every type of weight: their names, and functions of the rows that a pass has."""
    for k, n in itertools.product(SUMS, OUTPUTS):
        x, bias, short = torch.randn(ROWS, k), torch.randn(n), torch.randn(n, k).bfloat16()
        small, scale = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n)
        weights = {"float32": (short.float(), []), "bfloat16": (short, []), "int8": (small, [scale])}
        for name, (weight, scales) in weights.items():

            def run(rows: list[int], x: Tensor = x, w: Tensor = weight, s: list[Tensor] = scales) -> Tensor:
                return torch.ops.outpace_cpu.linears(x[rows], [w], s, [bias])  # noqa: B023

            yield f"{k} x {n} {name}", run


def attentions() -> Iterator[tuple[str, Callable[[list[int]], Tensor]]]:
    """Yield attention over one context, where each row sees itself and every third row before it."""
    for (heads, kv, dim), cap in itertools.product(HEADS, (0.0, 4.0)):
        q, pool, sinks = torch.randn(ROWS, heads, dim), torch.randn(2, 64, kv, dim), torch.randn(heads)
        bits = [sum(1 << j for j in range(i % 3, i + 1, 3)) for i in range(ROWS)]

        def run(rows: list[int], q: Tensor = q, pool: Tensor = pool, sinks: Tensor = sinks, cap: float = cap) -> Tensor:
            seen = torch.tensor([[bits[row], 0] for row in rows])  # noqa: B023
            jobs, positions = torch.tensor([[0, len(rows), 0, CONTEXT]]), CONTEXT + torch.tensor(rows) // 3
            options = [0.3, 17.0 if cap else 0.0, cap]  # scale, window, cap
            return torch.ops.outpace_cpu.attend(q[rows], *pool, [jobs, seen, positions], sinks, options)

        yield f"attention {heads, kv, dim}, cap {cap}", run


def differences() -> Iterator[str]:
    before: dict[str, Tensor] = {}
    for name, run in (*products(), *attentions()):
        torch.set_num_threads(1)
        alone = torch.cat([run([row]) for row in range(ROWS)])
        before[name] = alone
        whole = before.get(name.replace("bfloat16", "float32"))
        if whole is not None and not torch.equal(whole, alone):
            yield f"{name}: not the bits of float32"
        for threads in THREADS:
            torch.set_num_threads(threads)
            passes = [list(range(count)) for count in range(1, ROWS + 1)] + [list(range(5, 17))]
            wrong = [rows for rows in passes if not torch.equal(run(rows), alone[rows])]
            if wrong:
                yield f"{name}, {threads} threads: rows {wrong[0]} have other bits than alone"


if __name__ == "__main__":
    native_code.NATIVE[:] = sys.argv[1:]
    torch.manual_seed(0)
    print(f"built: {cpu.available()}", *differences(), sep="\n")  # noqa: T201
