"""Build and load few_rows.cpp: CPU operators for linear layers and attention on a few float32 rows."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from outpace.storage.files import cache_dir

SOURCE = Path(__file__).with_name("few_rows.cpp")
# No -ffast-math: the compiler would sum a single row in another order than four rows at once.
FEWEST_FLAGS = ["-O3", "-std=c++20", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC"]
FLAGS = ["-march=native", "-mprefer-vector-width=512", *FEWEST_FLAGS]  # not every compiler knows the first two

# The operators are defined here, so that they can be traced. The compiled library implements them.
OPS = torch.library.Library("outpace_cpu", "DEF")
OPS.define("linears(Tensor x, Tensor[] weights, Tensor[] scales, Tensor?[] biases) -> Tensor")
OPS.define("attend(Tensor q, Tensor keys, Tensor values, Tensor[] seen, Tensor? sinks, float[] options) -> Tensor")
OPS.impl(
    "linears",
    lambda x, weights, scales, biases: x.new_empty(*x.shape[:-1], sum(w.shape[0] for w in weights)),
    "Meta",
)
OPS.impl("attend", lambda q, *rest: torch.empty_like(q, memory_format=torch.contiguous_format), "Meta")


@cache
def available() -> bool:
    """Return whether the operators are available. They need a C++ compiler with OpenMP; the build is cached."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None or os.name != "posix":
        return False
    identity = [SOURCE.read_text(), compiler, torch.__version__, platform.processor(), platform.node(), *FLAGS]
    name = f"few_rows-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.so"
    target = cache_dir() / "kernels" / name
    try:
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            _compile(compiler, target)
        torch.ops.load_library(target)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _compile(compiler: str, target: Path) -> None:
    home = Path(torch.__file__).parent
    headers = [f"-I{home / 'include'}", f"-I{home / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        object_file, shared = Path(scratch) / "few_rows.o", Path(scratch) / target.name
        try:
            _run(compiler, *FLAGS, *headers, "-c", str(SOURCE), "-o", str(object_file))
        except subprocess.CalledProcessError:
            _run(compiler, *FEWEST_FLAGS, *headers, "-c", str(SOURCE), "-o", str(object_file))
        # Link with torch's own OpenMP: a second one would have its own threads, which compete for the cores.
        lib = home / "lib"
        own = next(iter(sorted(lib.glob("libgomp*"))), None)
        openmp = [str(own)] if own is not None else ["-fopenmp"]
        torch_libraries = [f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_cpu", "-lc10"]
        _run(compiler, "-shared", str(object_file), "-o", str(shared), *torch_libraries, *openmp)
        os.replace(shared, target)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
