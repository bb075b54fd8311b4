"""Disk cache of compiled layer code, so that the next process neither traces nor compiles.

The key of an entry is the kind of layer, the processor, and the versions of everything that the code was made from.
Loaded code is compared with eager passes before it is used, like newly compiled code. Entries are written by the same
user, in the cache folder, like torch's own compiled code.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import transformers
from torch import nn
from torch._inductor import config as inductor

from outpace.models.quantized import NESTED, layout, quantized_layers, settings
from outpace.storage.files import cache_dir, write_whole
from outpace.version import __version__

logger = logging.getLogger(__name__)
# Attributes of a module that its code does not depend on: torch's own, and how PEFT has made a layer, with its name.
APART = {*vars(nn.Module()), "kwargs"} - {"training"}
# Our source files that become part of the code.
OWN = ("compiled/layers.py", "compiled/packing.py", "hf/attention.py", "kernels/few_rows.cpp")


class CachedLayerCode(NamedTuple):
    """Compiled code of a layer and the names of its arguments."""

    call: Callable[..., Any]
    names: list[str]


def signature(layer: nn.Module, window: int | None) -> tuple[Any, ...]:
    """Return what layers that share code have in common: module types, plain attributes, tensor shapes and dtypes."""
    quantized = {id(module) for _, module in quantized_layers(layer)}
    modules = tuple(
        (name, type(module), _settings(module, id(module) in quantized)) for name, module in layer.named_modules()
    )
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return window, modules, tuple((name, layout(t)) for name, t in tensors)


def _settings(module: nn.Module, quantized: bool) -> tuple[tuple[str, object], ...]:
    """Return the plain attributes of a module, and those of the objects that a quantised layer keeps."""
    given = sorted((name, value) for name, value in vars(module).items() if name not in APART)
    return tuple((name, settings(value, NESTED if quantized else 0)) for name, value in given)


def place(layer: nn.Module, about: object) -> Path:
    """Return the folder for the code of a kind of layer; `about` is what layers that share code have in common."""
    sources = {inspect.getfile(type(module)) for module in layer.modules()}
    sources |= {str(Path(__file__).parents[1] / name) for name in OWN}
    digest = hashlib.sha256()
    for source in sorted(sources):
        digest.update(Path(source).read_bytes())
    # The code contains what the packages of its modules and tensors do, such as how a weight is unpacked.
    packages = {type(part).__module__.partition(".")[0] for part in (*layer.modules(), *layer.parameters())}
    found = [(package, getattr(sys.modules[package], "__version__", "")) for package in sorted(packages)]
    versions = torch.__version__, transformers.__version__, __version__, platform.python_version(), found
    processor = platform.processor(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    digest.update(repr((about, versions, processor)).encode())
    return cache_dir() / "layers" / digest.hexdigest()[:24]


@contextmanager
def keeping(folder: Path, names: list[str]) -> Iterator[None]:
    """Save what is compiled in this context: the code of one layer, with arguments of these names."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.standalone_compile import CacheCompiledArtifact
    from torch.compiler._cache import CacheArtifactManager

    # A fresh cache: torch's own entry for the same graph has guards on the sizes of another trace.
    with CacheArtifactManager.with_fresh_cache(), torch.compiler.config.patch(cache_key_tag=uuid4().hex):  # type: ignore[attr-defined]
        yield
        made = CacheCompiledArtifact(lambda: None, torch.compiler.save_cache_artifacts())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made.save(path=str(folder / "code.bin"), format="binary")
        write_whole(folder / "code.json", json.dumps({"names": names, "instructions": str(pick_vec_isa())}))
    except (OSError, RuntimeError, AssertionError) as error:
        logger.warning("Compiled code could not be saved for the next run: %s", error)


def load(folder: Path) -> CachedLayerCode | None:
    """Load saved code; return None if there is none that can be used."""
    try:
        about = json.loads((folder / "code.json").read_text(encoding="utf-8"))
        if not _known(about["instructions"]):
            return None
        from torch._inductor.standalone_compile import CompiledArtifact

        return CachedLayerCode(
            CompiledArtifact.load(path=str(folder / "code.bin"), format="binary"), list(about["names"])
        )
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is wrong, the layer can be compiled again
        logger.info("Saved compiled code cannot be used, so it is compiled again: %s", error)
        return None


def _known(instructions: str) -> bool:
    """Return whether the processor has the vector instructions that the code was compiled for.

    If so, the compiler skips its own test of them, which takes a second in every process.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    before = inductor.cpp.vec_isa_ok
    inductor.cpp.vec_isa_ok = True
    if str(pick_vec_isa()) == instructions:
        return True
    inductor.cpp.vec_isa_ok = before
    return False
