"""Kept code: what the compiler made of a kind of layer, on disk, so that the next process neither traces nor compiles.

The code belongs to one kind of layer, one processor and one version of everything that it was made from; all of that is
its key. It is compared with eager passes before it is used, like code that was just compiled. What is read here was
written by the same user, in the cache folder, as all of torch's own compiled code is.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import transformers
from torch import nn
from torch._inductor import config as inductor

from outpace.storage.files import cache_dir, write_whole
from outpace.version import __version__

logger = logging.getLogger(__name__)
# Files of ours that become part of the code.
OWN = ("compiled/layers.py", "compiled/packing.py", "hf/attention.py", "kernels/few_rows.cpp")


class CachedLayerCode(NamedTuple):
    """Compiled code of a layer, and the names of its arguments."""

    call: Callable[..., Any]
    names: list[str]


def place(layer: nn.Module, about: object) -> Path:
    """Where the code of a kind of layer is kept; `about` is what makes two layers of these classes the same code."""
    sources = {inspect.getfile(type(module)) for module in layer.modules()}
    sources |= {str(Path(__file__).parents[1] / name) for name in OWN}
    digest = hashlib.sha256()
    for source in sorted(sources):
        digest.update(Path(source).read_bytes())
    versions = torch.__version__, transformers.__version__, __version__, platform.python_version()
    processor = platform.processor(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    digest.update(repr((about, versions, processor)).encode())
    return cache_dir() / "layers" / digest.hexdigest()[:24]


@contextmanager
def keeping(folder: Path, names: list[str]) -> Iterator[None]:
    """Keep what is compiled inside: the code of one layer, whose arguments have these names."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.standalone_compile import CacheCompiledArtifact
    from torch.compiler._cache import CacheArtifactManager

    # What torch remembers of the same graph has conditions on the sizes of another trace, so it is not asked.
    with CacheArtifactManager.with_fresh_cache(), torch.compiler.config.patch(cache_key_tag=uuid4().hex):  # type: ignore[attr-defined]
        yield
        made = CacheCompiledArtifact(lambda: None, torch.compiler.save_cache_artifacts())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made.save(path=str(folder / "code.bin"), format="binary")
        write_whole(folder / "code.json", json.dumps({"names": names, "instructions": str(pick_vec_isa())}))
    except (OSError, RuntimeError, AssertionError) as error:
        logger.warning("compiled code could not be kept: %s", error)


def load(folder: Path) -> CachedLayerCode | None:
    """What was kept; None if there is nothing that can be used."""
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
    except Exception as error:  # whatever is wrong with it, it can be compiled again
        logger.info("compiled code that was kept cannot be used: %s", error)
        return None


def _known(instructions: str) -> bool:
    """Whether the processor has the instructions that were tried when the code was made. The compiler would try them
    again in every process, which takes a second."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    before = inductor.cpp.vec_isa_ok
    inductor.cpp.vec_isa_ok = True
    if str(pick_vec_isa()) == instructions:
        return True
    inductor.cpp.vec_isa_ok = before
    return False
