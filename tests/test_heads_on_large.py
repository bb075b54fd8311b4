"""The benchmark of heads on a large model runs from its arguments to its table, on a tiny shape."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import outpace
from outpace.heads import store
from outpace.models.hf.lm import TransformersLM
from outpace.sampling.noise import gumbel
from tests.benchmark_scripts import script, small_llama
from tests.test_grown_heads import HEADS, TINY, small_head

METHODS = ["suffix", "auto", "eagle3:nodes=8,depth=3", "block:nodes=8", "mtp:depth=3", "medusa:nodes=8"]


@pytest.fixture
def module() -> ModuleType:
    return script("heads_on_large")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a head of each kind, and prompts in the format of Spec-Bench."""
    path = tmp_path_factory.mktemp("small")
    lm = small_llama(path / "model").lm
    for name in ("eagle3", "block-linked", "mtp-taps", "medusa-linked"):
        assert name in HEADS
        head = small_head(name, lm)
        store.save(head, path / "heads" / head.spec.kind, lm)
    lines = [{"task": f"t{i % 2}", "id": str(i), "turns": [f"{i} 1 2 3 1 2"]} for i in range(5)]
    (path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def asked(folder: Path, *more: str) -> list[str]:
    given = {"--small": "model", "--small-heads": "heads", "--prompts": "prompts.jsonl"}
    files = [part for option, name in given.items() for part in (option, str(folder / name))]
    return [*files, "--shape", "tiny", "--max-tokens", "8", "--limit", "3", "--rounds", "1", *more]


def test_the_whole_script(
    module: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(module.SHAPES, "tiny", TINY)
    more = asked(folder, "--batches", "1", "4", "--narrow", "--methods", *METHODS)
    monkeypatch.setattr("sys.argv", ["heads_on_large.py", *more])
    module.main()
    printed = capsys.readouterr().out
    head, _, *rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert head == "| method | 1 greedy | 4 greedy | 1 at temperature 0.8 | 4 at temperature 0.8 |"
    assert [row.split("`")[1] for row in rows] == ["plain", *METHODS]
    for row in rows:
        assert len(re.findall(r"\d+, \d\.\d\d x, \d\.\d\d a pass", row)) == 4
    assert "5 prompts are repeated to make 8" in printed and "- eagle3: " in printed


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_that_part_are_explained(module: ModuleType, folder: Path, temperature: float) -> None:
    model = outpace.load(str(folder / "model"), dtype="float32", device="cpu")
    contest = module.Contest(model, {}, "auto", 6)
    column = module.Column(2, temperature, [[1, 2, 3], [4, 5]])
    plain = contest.run("plain", column)
    assert contest.differences(column, plain, plain) == "0"
    other = [list(text) for text in plain.texts]
    lm: Any = model.lm
    assert isinstance(lm, TransformersLM)
    with torch.no_grad():
        logits = lm.model(torch.tensor([[1, 2, 3, *other[0][:2]]])).logits[0, -1].double()
    scores = logits + temperature * gumbel(torch.arange(len(logits)), module.SEED, 5)
    best = scores.topk(2)
    assert best.indices[0] == other[0][2]
    other[0][2] = int(best.indices[1])
    gap = float(best.values[0] - best.values[1])
    found = contest.differences(column, plain, module.Run(1.0, 1.0, other))
    assert found == f"1 (of 1 examined, at most {gap:.3f} apart)"
    ended = [plain.texts[0][:3], plain.texts[1]]
    assert contest.differences(column, plain, module.Run(1.0, 1.0, ended)) == "1 (none could be examined)"
