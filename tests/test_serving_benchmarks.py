"""The benchmarks of serving run, on a toy: what they measure is for people to run."""

from __future__ import annotations

from argparse import Namespace

import pytest

from tests.benchmark_scripts import script
from tests.tiny_tokenizers import random_model


def test_overhead(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    serving = script("serving")
    monkeypatch.setattr(serving, "made_up", lambda shape: random_model("tiktoken"))
    serving.overhead(Namespace(random="toy", method="plain", clients=2, tokens=5, rounds=1))
    said = capsys.readouterr().out
    assert said.splitlines()[-2].startswith("| whole |") and said.splitlines()[-1].startswith("| streamed |")


def test_results_of_a_contestant() -> None:
    found = script("llama_server").Results()
    answered = script("serving_parts").Answered
    found.add(answered(seconds=2.0, texts=["a", "b"], tokens=100, first=[0.1, 0.3]))
    found.add(answered(seconds=1.0, texts=["a", "b"], tokens=100, first=[0.1, 0.3]))
    assert found.cells[:2] == ["75.0", "200"]
