"""The benchmarks of graft and via_sd run, on a toy: what they measure is for people to run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from outpace.api.model import Model
from outpace.drafting import tuning_file
from outpace.prompts.tasks import Prompt
from outpace.testing import ByteTokenizer, ToyLM

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{request.param}", FOLDER / f"{request.param}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", ["graft"], indirect=True)
def test_graft(script: ModuleType) -> None:
    given = script.arguments().parse_args(["--nodes", "12", "--max-tokens", "30", "--level-cost", "0.2"])
    prompts = [[1, 2, 3, i] for i in range(8)]
    text = script.compare(Model(ToyLM(3)), ToyLM(2), prompts, given)
    assert text.count("| yes |") == 5 and "**no**" not in text and "Calibrated gates" in text


@pytest.mark.parametrize("script", ["via_sd"], indirect=True)
@pytest.mark.parametrize("timed", [False, True])
def test_via_sd(script: ModuleType, timed: bool, tmp_path: Path) -> None:
    tuning_file.write(tmp_path / "c.json", {"via_sd": {"layers": [0, 1, 3]}})
    asked = ["--samples", "50", "--max-tokens", "8", "--calibration", str(tmp_path / "c.json"), "--rounds", "1"]
    given = script.arguments().parse_args(asked + ([] if timed else ["--untimed"]))
    model, draft = Model(ToyLM(4, vocab=257), ByteTokenizer()), Model(ToyLM(2, vocab=257), ByteTokenizer())
    prompts = [Prompt("math", str(i), (text,), answer="1") for i, text in enumerate(("ab", "cd 1"))]
    points = script.points_of(model, draft, prompts, given)
    assert [point.lossless for point in points] == [True, True] + [False] * len(script.POINTS)
    assert all((point.speedup is not None) == timed for point in points)
    assert script.table(points).count("\n") == len(points) + 1
    script.plot(points, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 0
