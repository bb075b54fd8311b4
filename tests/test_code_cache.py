"""Compiled code that is kept: the next process uses it, and nothing that does not fit or is broken is used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import outpace
from outpace.models.compiled import code_cache, layers
from outpace.models.compiled.cpu import CpuRunner
from outpace.models.kernels import cpu
from tests import tiny_models

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C++ compiler")
PROMPTS = [[5, 9, 2, 7] * 4, [1, 2, 3], list(range(20, 60))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(code_cache, "cache_dir", lambda: tmp_path)
    yield tmp_path / "layers"


def fast(kind: str = "llama") -> outpace.Model:
    model = outpace.wrap(tiny_models.MODELS[kind]().float(), compile=True)
    assert isinstance(model.lm.runner, CpuRunner)
    return model


def texts(model: outpace.Model) -> list[list[int]]:
    return [c.tokens for c in model.generate(PROMPTS, method="recycling", temperature=0.9, max_tokens=16)]


def kinds(model: outpace.Model) -> list[layers.LayerKind]:
    assert isinstance(model.lm.runner, CpuRunner)
    return model.lm.runner.layer_kinds


def never(*_: object) -> None:
    raise AssertionError("it was compiled again")


@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # one kind of layer, and two
def test_code_is_compiled_once(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fast(kind)
    expected, count = texts(first), len(kinds(first))
    assert len(list(folder.iterdir())) == count and not any(k.kept for k in kinds(first))
    monkeypatch.setattr(layers.LayerKind, "backend", never)
    again = fast(kind)
    assert all(k.kept and k.direct for k in kinds(again)) and len(kinds(again)) == count
    assert texts(again) == expected
    assert again.lm.runner.compile_seconds == 0.0  # type: ignore[attr-defined]


def test_code_of_another_kind_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast()
    (mine,) = folder.iterdir()
    wider = tiny_models.build("llama", torch.float32, num_key_value_heads=2, head_dim=8, intermediate_size=64)
    other = outpace.wrap(wider, compile=True)
    assert len(list(folder.iterdir())) == 2 and not any(k.kept for k in kinds(other))
    monkeypatch.setattr(torch, "__version__", "0.0")
    layer = tiny_models.MODELS["llama"]().float().model.layers[0]
    assert code_cache.place(layer, "about") != mine
    places = {code_cache.place(layer, "about")}
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another processor")
    places.add(code_cache.place(layer, "about"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    places.add(code_cache.place(layer, "about"))
    assert len(places) == 3


@pytest.mark.parametrize("broken", ["code.bin", "code.json", "instructions"])
def test_what_is_broken_is_compiled_again(broken: str, folder: Path) -> None:
    expected = texts(fast())
    (place,) = folder.iterdir()
    if broken == "instructions":
        about = json.loads((place / "code.json").read_text())
        (place / "code.json").write_text(json.dumps(about | {"instructions": "those of another processor"}))
    else:
        (place / broken).write_bytes(b"{")
    again = fast()
    assert not any(k.kept for k in kinds(again)) and texts(again) == expected
    assert all(k.kept for k in kinds(fast()))  # it is whole again


def test_code_that_gives_wrong_numbers_is_thrown_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = texts(fast())
    load = code_cache.load

    def off(place: Path) -> code_cache.CachedLayerCode | None:
        found = load(place)
        return None if found is None else found._replace(call=lambda *given: [found.call(*given)[0] * 1.5])

    monkeypatch.setattr(code_cache, "load", off)
    again = fast()
    assert not any(k.kept for k in kinds(again)) and texts(again) == expected


def test_a_folder_that_cannot_be_written_costs_only_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.parent.joinpath("layers").write_text("a file where the folder should be")
    assert texts(fast())
