"""The comparison with vLLM runs on a tiny model beside a stub of vLLM, which records what it was asked for."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmark_scripts import script
from tests.test_grown_heads import TINY

# What the script uses of vLLM 0.26: LLM, SamplingParams, and outputs with token ids.
STUB = """
import json, os, types

__version__ = "0.26.0"

class SamplingParams:
    def __init__(self, max_tokens, ignore_eos, detokenize, temperature, top_k=0, top_p=1.0):
        assert ignore_eos and not detokenize
        self.max_tokens, self.asked = max_tokens, [temperature, top_k, top_p]

class LLM:
    def __init__(self, model, skip_tokenizer_init, dtype, max_model_len, max_num_seqs, enable_prefix_caching,
                 gpu_memory_utilization):
        assert skip_tokenizer_init and not enable_prefix_caching and os.path.isdir(model)

    def generate(self, prompts, params, use_tqdm):
        with open(os.environ["SEEN"], "a") as file:
            file.write(json.dumps([[p["prompt_token_ids"] for p in prompts], params.asked, params.max_tokens]) + "\\n")
        made = types.SimpleNamespace(token_ids=[1] * params.max_tokens)
        return [types.SimpleNamespace(outputs=[made]) for _ in prompts]
"""
FEW = ["--requests", "1", "3", "--lengths", "24", "8", "--short", "1", "--long", "4", "--rounds", "1"]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = script("vllm_side_by_side")
    monkeypatch.setattr(found, "MANY", 2)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(script("grown").SHAPES, "tiny", TINY)
        script("vllm_side_by_side").write_random(folder, "tiny")
    return folder


def asked(module: ModuleType, model: Path, *more: str) -> argparse.Namespace:
    return module.arguments().parse_args([str(model), *FEW, *more])


def test_both_engines_get_the_same(
    module: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text(STUB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    ours: list[Any] = []
    complete = module.OutpaceEngine.complete

    def recorded(self: Any, prompts: list[list[int]], tokens: int, settings: dict[str, Any]) -> None:
        ours.append([prompts, [settings["temperature"], settings.get("top_k", 0), settings.get("top_p", 1.0)], tokens])
        complete(self, prompts, tokens, settings)

    monkeypatch.setattr(module.OutpaceEngine, "complete", recorded)
    found = {}
    for name in module.ENGINES:
        given = asked(module, model, "--engine", name, "--report", str(tmp_path / name))
        module.report(given)
        found[name] = json.loads((tmp_path / name).read_text())
    monkeypatch.delitem(sys.modules, "vllm")
    theirs = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert theirs == ours
    assert {tuple(settings) for _, settings, _ in ours} == {(0.0, 0, 1.0), (0.8, 0, 1.0), (0.8, 50, 0.9)}
    names = [case.name for case in module.cases(given)]
    assert names[:2] == ["tokens/s, 1 requests, greedy", "tokens/s, 3 requests, greedy"]
    assert names[-3:] == [f"ms to the first token, {what} tokens" for what in ("1 x 24", "1 x 8", "2 x 8")]
    assert list(found["outpace"]["measured"]) == list(found["vllm"]["measured"]) == names
    assert found["vllm"]["versions"]["vllm"] == "0.26.0"


def test_rates_and_ratios(module: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: a prompt takes 2 seconds, and a token half a second."""
    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])

    class Slow:
        def complete(self, prompts: list[list[int]], tokens: int, settings: dict[str, Any]) -> None:
            clock[0] += 2 * len(prompts) + 0.5 * tokens

    given, rate, first = asked(module, model), module.Case(3, 8, "greedy"), module.Case(1, 8)
    assert module.measure(Slow(), rate, 100, given) == pytest.approx(6.0)
    assert module.measure(Slow(), first, 100, given) == pytest.approx(2500.0)
    found = {
        "outpace": {"measured": {rate.name: 6.0, first.name: 2.0}, "gpu": "H", "versions": {"torch": "2"}},
        "vllm": {"measured": {rate.name: 3.0, first.name: 8.0}, "gpu": "H", "versions": {"torch": "3"}},
    }
    text = module.table(found, [rate, first], "python x")
    assert f"| {rate.name} | 6.0 | 3.0 | 2.00 |" in text and f"| {first.name} | 2.0 | 8.0 | 4.00 |" in text
    assert "`python x`, H; outpace in an environment with torch 2; vllm in an environment with torch 3." in text


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_the_whole_script_without_vllm(
    module: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    few = ["--requests", "1", "--settings", "greedy", *FEW[3:]]
    monkeypatch.setattr("sys.argv", ["vllm_side_by_side.py", str(model), *few])
    root = str(Path(__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", root)
    module.main()
    printed = capfd.readouterr().out
    assert re.search(r"\| tokens/s, 1 requests, greedy \| [\d.,-]+ \|  \|  \|", printed)
    assert printed.rstrip().endswith("Left out: vllm is not installed.")
