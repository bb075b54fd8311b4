"""The wheel: small, with every file that the code reads, and without trained weights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outpace.storage import weights

ROOT = Path(__file__).parent.parent
LARGEST = 3_000_000  # bytes
READ = {
    "catalogue.json", "py.typed", "page.html", "page.css", "page.js", "parts.css", "parts.js", "controls.js",
    "report.html", "prompts.jsonl", "few_rows.cpp", "weights.json",
}  # fmt: skip
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Built from a copy: a build leaves folders behind."""
    pytest.importorskip("setuptools", minversion="77", reason="the wheel is built with setuptools 77 or later")
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    shutil.copytree(ROOT / "outpace", source / "outpace", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(place)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    yield next(place.glob("*.whl"))


def test_it_is_small_and_has_what_the_code_reads(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {Path(name).name for name in names} >= READ
    assert not [name for name in names if name.endswith((".safetensors", ".gguf", ".bin"))]
    assert wheel.stat().st_size < LARGEST
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "outpace").rglob("*.py")}
    assert there == {name for name in names if name.endswith(".py")}


def test_what_was_installed_from_it_has_no_weights_and_fetches_them(wheel: Path, tmp_path: Path) -> None:
    name = "smollm2-135m-instruct-medusa"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    asked = f"print(weights.__file__, weights.local({name!r}), weights.fetch({name!r}))"
    environment = {
        **os.environ, "PYTHONPATH": str(tmp_path / "installed"), "OUTPACE_CACHE": str(tmp_path / "cache"),
        weights.SETTING: "",
    }  # fmt: skip

    def run(**setting: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", f"from outpace.storage import weights; {asked}"]
        return subprocess.run(
            command, cwd=tmp_path, env=environment | setting, capture_output=True, text=True, check=False
        )

    assert "set OUTPACE_WEIGHTS to a copy" in run().stderr
    module, found, fetched = run(OUTPACE_WEIGHTS=str(ROOT / "weights")).stdout.split()
    assert Path(module).is_relative_to(tmp_path) and found == "None"
    assert Path(fetched, "head.safetensors").read_bytes() == (ROOT / "weights" / name / "head.safetensors").read_bytes()
