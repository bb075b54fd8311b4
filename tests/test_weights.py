"""Trained weights by name: what the manifest says of them, where they are found, and what is refused on the way."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from outpace.api.model import Model
from outpace.drafting.head_drafter import trained
from outpace.errors import HeadNotFound, OutpaceError, UsageError
from outpace.heads import store
from outpace.storage import download, weights
from outpace.storage.weights import TrainedWeights, WeightsFile
from outpace.testing import ToyLM

ROOT = Path(__file__).parent.parent
NAME = "tiny-medusa"
FILES = {"head.json": b'{"not": "really a head"}', "head.safetensors": b"not really weights" * 100_000}


# The manifest says what is in the folder.


@pytest.mark.parametrize("name", weights.manifest())
def test_the_manifest_says_what_is_in_the_folder(name: str) -> None:
    entry, folder = weights.manifest()[name], ROOT / "weights" / name
    assert sorted(file.name for file in entry.files) == sorted(path.name for path in folder.iterdir())
    for file in entry.files:
        content = (folder / file.name).read_bytes()
        assert (file.sha256, file.bytes) == (hashlib.sha256(content).hexdigest(), len(content))
    said = store.about(folder)
    assert (entry.kind, entry.target) == (said["spec"]["kind"], said["target"])
    assert entry.name == f"{entry.model}-{entry.kind}" and entry.licence == "Apache-2.0"


@pytest.mark.parametrize("name", weights.manifest())
def test_the_command_is_the_one_whose_settings_lie_beside_the_weights(name: str) -> None:
    entry = weights.manifest()[name]
    settings = store.about(ROOT / "weights" / name)["notes"]["settings"]
    _, _, kind, model, *flags = shlex.split(entry.command)
    assert (kind, model) == (settings["kind"], settings["model"])
    given: dict[str, Any] = {"data": [], "head": {}}
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        option = flag.removeprefix("--").replace("-", "_")
        if option == "data":
            given["data"].append(value)
        elif option == "head":
            given["head"] |= {key: yaml.safe_load(text) for key, _, text in [value.partition("=")]}
        else:
            given[option] = type(settings[option])(value)
    assert given == {option: settings[option] for option in given}


def test_no_folder_lacks_an_entry() -> None:
    assert {path.name for path in (ROOT / "weights").iterdir() if path.is_dir()} == set(weights.manifest())


# Where weights are found.


def pinned(files: dict[str, bytes], **given: Any) -> TrainedWeights:
    listed = tuple(WeightsFile(name, hashlib.sha256(c).hexdigest(), len(c)) for name, c in files.items())
    return TrainedWeights(NAME, "medusa", "tiny", given.get("target", {}), "MIT", "a test", listed)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the one set of weights that there is, and a machine that has none of it."""
    folder = tmp_path / "a copy" / NAME
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(weights.SETTING, raising=False)
    monkeypatch.setattr(weights, "CHECKOUT", tmp_path / "no checkout")
    monkeypatch.setattr(weights, "manifest", lambda: {NAME: pinned(FILES)})
    yield folder


def in_the_cache(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_checkout_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(weights.SETTING, raising=False)
    for name in weights.manifest():
        assert weights.local(name) == weights.fetch(name) == ROOT / "weights" / name
    with pytest.raises(UsageError, match="did you mean 'smollm2-135m-instruct-mtp'"):
        weights.fetch("smollm2-135m-instruct-mpt")


@pytest.mark.parametrize("spelling", ["folder", "folder/", "file", "home"])
def test_they_are_fetched_once(
    spelling: str, served: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = served.parent
    monkeypatch.setenv("HOME", str(place.parent))
    given = {"folder": str(place), "folder/": f"{place}/", "file": f"{place.as_uri()}/", "home": f"~/{place.name}"}
    monkeypatch.setenv(weights.SETTING, given[spelling])
    assert weights.local(NAME) is None
    found = weights.fetch(NAME)
    assert {path.name: path.read_bytes() for path in found.iterdir()} == FILES
    assert list(found.parent.iterdir()) == [found] and found.name.startswith(f"{NAME}-")
    assert capsys.readouterr().out == ""
    monkeypatch.delenv(weights.SETTING)
    assert weights.fetch(NAME) == weights.local(NAME) == found


def test_other_files_of_the_same_name_lie_elsewhere(served: Path) -> None:
    changed = pinned(FILES | {"head.json": b"{}"})
    assert changed.kept.parent == pinned(FILES).kept.parent and changed.kept != pinned(FILES).kept


def test_a_cached_file_that_was_cut_short_is_fetched_again(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(weights.SETTING, str(served.parent))
    found = weights.fetch(NAME)
    (found / "head.safetensors").write_bytes(b"not")
    assert weights.local(NAME) is None
    assert (weights.fetch(NAME) / "head.safetensors").read_bytes() == FILES["head.safetensors"]


def test_two_processes_at_once(tmp_path: Path) -> None:
    """Both wait for the same sign before they fetch into the same empty cache."""
    program = """
import os, pathlib, sys, time
from outpace.storage import weights
weights.CHECKOUT = pathlib.Path("nowhere")
print("ready", flush=True)
sys.stdin.readline()
print(weights.fetch("smollm2-135m-instruct-medusa"))
"""
    environment = {"OUTPACE_CACHE": str(tmp_path), weights.SETTING: str(ROOT / "weights"), "PYTHONPATH": str(ROOT)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen([sys.executable, "-c", program], env=environment, text=True, **pipes) for _ in range(2)]
    for process in both:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    found = {Path(out.strip()) for out, _ in said}
    assert len(found) == 1 and list((tmp_path / "weights").iterdir()) == list(found)
    file = found.pop() / "head.safetensors"
    assert file.read_bytes() == (ROOT / "weights" / "smollm2-135m-instruct-medusa" / file.name).read_bytes()


# What is refused, and leaves nothing behind.


@pytest.mark.parametrize("what", ["other", "short", "long"])
def test_a_file_that_is_another_one(what: str, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = FILES["head.safetensors"]
    changed = {"other": b"X" + content[1:], "short": content[:-1], "long": content + b"X" * (3 << 20)}[what]
    (served / "head.safetensors").write_bytes(changed)
    monkeypatch.setenv(weights.SETTING, str(served.parent))
    expected, read = hashlib.sha256(content).hexdigest(), changed[: len(content) + 1]  # no more of it is read
    found = hashlib.sha256(read).hexdigest()
    with pytest.raises(OutpaceError, match=rf"head\.safetensors is not .* {expected} .*found {found}"):
        weights.fetch(NAME)
    assert in_the_cache(tmp_path) == [] and weights.local(NAME) is None


def test_nobody_says_where_they_are(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for unset in ("", "  "):
        monkeypatch.setenv(weights.SETTING, unset)
        with pytest.raises(HeadNotFound, match=r"clone of the repository, or set OUTPACE_WEIGHTS .* or train"):
            weights.fetch(NAME)


@pytest.mark.parametrize(
    ("given", "said"), [("http://a.b/weights", "plain http"), ("ftp://a.b", "ftp:// is not supported")]
)
def test_addresses_that_are_not_used(given: str, said: str, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(weights.SETTING, given)
    with pytest.raises(UsageError, match=said):
        weights.fetch(NAME)


def test_a_server_cannot_send_on_to_plain_http(tmp_path: Path) -> None:
    """A redirection is opened by the same handlers, which know no http."""
    with pytest.raises(OutpaceError, match="unknown url type: http") as caught:
        download.download("http://127.0.0.1/head.json", tmp_path / "head.json", "", 1, print)
    assert isinstance(caught.value.__cause__, urllib.error.URLError)


@pytest.mark.parametrize("given", ["/no/such/folder", "file:///no/such/folder", "https://127.0.0.1:1/weights"])
def test_places_that_are_not_there(given: str, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(weights.SETTING, given)
    with pytest.raises(OutpaceError, match=r"cannot fetch .*head\.json .*; check the network"):
        weights.fetch(NAME)
    assert in_the_cache(tmp_path) == []


def test_a_cache_that_cannot_be_written(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(weights.SETTING, str(served.parent))
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OutpaceError, match="set OUTPACE_CACHE"):
        weights.fetch(NAME)


@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_download_leaves_nothing(
    stop: type[BaseException], served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(url: str, most: int) -> Iterator[bytes]:
        yield b"the beginning"
        raise stop

    monkeypatch.setenv(weights.SETTING, str(served.parent))
    monkeypatch.setattr(download, "_blocks", cut_short)
    with pytest.raises(stop):
        weights.fetch(NAME)
    assert in_the_cache(tmp_path) == [] and list((tmp_path / "cache" / "weights").iterdir()) == []


# Who fetches: a request that asks for a head, and nothing else.


@pytest.fixture
def elsewhere(served: Path, monkeypatch: pytest.MonkeyPatch) -> ToyLM:
    """A model with a trained head that is not on this machine."""
    lm = ToyLM()
    store.save(store.fresh("medusa", lm), served, lm)
    entry = pinned({name: (served / name).read_bytes() for name in FILES}, target=store.about(served)["target"])
    monkeypatch.setattr(weights, "manifest", lambda: {NAME: entry})
    return lm


def test_looking_for_a_head_fetches_nothing(elsewhere: ToyLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "fetch", lambda name: pytest.fail("nobody asked for it"))
    for setting in ("", str(tmp_path / "a copy")):
        monkeypatch.setenv(weights.SETTING, setting)
        assert not trained("medusa", elsewhere)
        Model(elsewhere).generate([1, 2, 3], method="auto", max_tokens=4)


def test_a_request_that_asks_for_a_head_fetches_it(
    elsewhere: ToyLM, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HeadNotFound, match="no medusa head for this model is on this machine"):
        Model(elsewhere).generate([1, 2, 3], method="medusa", max_tokens=4)
    with pytest.raises(HeadNotFound, match="No block head ships for this model"):
        Model(elsewhere).generate([1, 2, 3], method="block", max_tokens=4)
    monkeypatch.setenv(weights.SETTING, str(served.parent))
    Model(elsewhere).generate([1, 2, 3], method="medusa", max_tokens=4)
    assert weights.local(NAME) == store.local("medusa", elsewhere) and trained("medusa", elsewhere)
    assert not trained("block", elsewhere) and not trained("medusa", ToyLM(layers=3)) and not trained("mtp", elsewhere)


def test_another_model_of_the_same_size_gets_no_head(elsewhere: ToyLM) -> None:
    with pytest.raises(HeadNotFound, match="ships for this model"):
        store.resolve("medusa", None, ToyLM(seed=1))


def test_a_head_of_the_users_own_comes_before_a_download(
    elsewhere: ToyLM, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(weights.SETTING, str(served.parent))
    own = tmp_path / "cache" / "heads" / "mine"
    store.save(store.fresh("medusa", elsewhere), own, elsewhere)
    assert store.local("medusa", elsewhere) == own
    assert store.resolve("medusa", None, elsewhere).kind == "medusa" and weights.local(NAME) is None


def test_the_manifest_is_read_without_torch() -> None:
    program = "import sys; from outpace.storage import weights; weights.manifest(); print({'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    assert json.loads(weights.MANIFEST.read_text()).keys() == weights.manifest().keys()
    assert replace(weights.manifest()["smollm2-135m-instruct-mtp"], name="x").kept.name.startswith("x-")
