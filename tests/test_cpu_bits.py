"""CPU kernels round each row of a pass alone, whatever the instruction set, the number of rows and of threads."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import outpace
from outpace.core.tree import Tree
from outpace.models.compiled.cpu import CpuRunner
from outpace.models.kernels import cpu
from tests import tiny_models

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C++ compiler")
# Each with the torch capability that shows that this processor has it.
LEVELS = {
    "x86-64-v2": ("DEFAULT", "AVX2", "AVX512"),
    "x86-64-v3": ("AVX2", "AVX512"),
    "x86-64-v4": ("AVX512",),
    "native": ("DEFAULT", "AVX2", "AVX512"),
}
TOKENS = [3, 1, 4, 1, 5, 9]
THREADS = (1, 2, 3, 16)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_has_the_same_bits_in_every_pass_on_every_instruction_set(level: str) -> None:
    if platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() not in LEVELS[level]:
        pytest.skip(f"not a processor of {level}")
    command = [sys.executable, "-m", "tests.few_rows_bits", f"-march={level}", "-mprefer-vector-width=512"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.stdout.split("\n") == ["built: True", ""], done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_pass_gives_the_same_bits_alone_and_in_a_tree_with_any_number_of_threads(kind: str) -> None:
    lm = outpace.wrap(tiny_models.MODELS[kind]().to(torch.float32), compile=True).lm
    assert isinstance(lm.runner, CpuRunner)
    slot = [lm.acquire([])]
    lm.feed([list(range(20, 60))], slot)
    tree = Tree.chain(TOKENS)
    for node in range(5):
        tree.add(node, 40 + node)
    found = {}
    for count in THREADS:
        torch.set_num_threads(count)
        for size in range(1, len(TOKENS) + 1):
            found[count, size] = lm.score([Tree.chain(TOKENS[:size])], slot)[0].logits.all()[:size].clone()
        found[count, len(tree)] = lm.score([tree], slot)[0].logits.all()[: len(TOKENS)].clone()
    one_by_one = []
    for token in TOKENS:
        one_by_one.append(lm.score([Tree([token])], slot)[0].logits.all().clone())
        lm.keep([[0]], slot)
    expected = torch.cat(one_by_one)  # [tokens, vocab]
    assert [key for key, logits in found.items() if not torch.equal(logits, expected[: len(logits)])] == []
