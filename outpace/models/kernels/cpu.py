"""few_rows.c, compiled once for this machine, as operators of torch: products and attention of a few float32 rows."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from outpace.shelf import cache_dir

SOURCE = Path(__file__).with_name("few_rows.c")
# No -ffast-math: the compiler would order the sums of one row in one way, and those of four rows in another.
FEWEST_FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC"]
FLAGS = ["-march=native", "-mprefer-vector-width=512", *FEWEST_FLAGS]  # not every compiler knows the first two


class Matrix(ctypes.Structure):
    """`matrix` of few_rows.c."""

    _fields_ = [("weight", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("bias", ctypes.c_void_p),
                ("n", ctypes.c_int64), ("first", ctypes.c_int64)]  # fmt: skip


class Attention(ctypes.Structure):
    """`attention` of few_rows.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "sinks", "jobs", "bits", "positions", "out")),
        *((name, ctypes.c_int64) for name in ("count", "heads", "kv_heads", "dim", "words", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there is no C compiler with OpenMP. Built once, then found in the cache."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if compiler is None or os.name != "posix":
        return None
    identity = [SOURCE.read_text(), compiler, torch.__version__, platform.processor(), platform.node(), *FLAGS]
    name = f"few_rows-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.so"
    target = cache_dir() / "kernels" / name
    try:
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            _compile(compiler, target)
        found = ctypes.CDLL(str(target))
    except (OSError, subprocess.CalledProcessError):
        return None
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    found.few_rows_linear.argtypes = [pointer, pointer, pointer, integer, integer, integer]
    found.few_rows_attention.argtypes = [pointer]
    return found


def _compile(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        object_file, shared = Path(scratch) / "few_rows.o", Path(scratch) / target.name
        try:
            _run(compiler, *FLAGS, "-c", str(SOURCE), "-o", str(object_file))
        except subprocess.CalledProcessError:
            _run(compiler, *FEWEST_FLAGS, "-c", str(SOURCE), "-o", str(object_file))
        # Linked with torch's own OpenMP: two of them would have two sets of threads that fight for the cores.
        lib = Path(torch.__file__).parent / "lib"
        own = next(iter(sorted(lib.glob("libgomp*"))), None)
        openmp = [str(own), f"-Wl,-rpath,{lib}"] if own is not None else ["-fopenmp"]
        _run(compiler, "-shared", str(object_file), "-o", str(shared), *openmp, "-lm")
        os.replace(shared, target)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def linears(x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor | None]) -> Tensor:
    """Several products of the same rows, side by side; int8 weights come with a scale per output, others with none."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    matrices = _matrices(tuple(weights), tuple(scales), tuple(biases))
    width = sum(weight.shape[0] for weight in weights)
    out = rows.new_empty(rows.shape[0], width)
    _library().few_rows_linear(
        rows.data_ptr(), out.data_ptr(), matrices, len(weights), rows.shape[0], rows.shape[1]
    )  # fmt: skip
    return out.view(*x.shape[:-1], width)


def _matrices(weights: tuple[Tensor, ...], scales: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> object:
    array = (Matrix * len(weights))()
    first = 0
    for i, weight in enumerate(weights):
        bias, n = biases[i], weight.shape[0]
        pointers = (weight.data_ptr(), scales[i].data_ptr() if scales else 0, 0 if bias is None else bias.data_ptr())
        array[i] = Matrix(*pointers, n, first)
        first += n
    return array


def attend(
    q: Tensor,  # [tokens, heads, dim]
    keys: Tensor,  # [pool, kv heads, dim]
    values: Tensor,
    seen: list[Tensor],  # jobs [jobs, 4], bits [tokens, words], positions [tokens]: see `models.lane`
    sinks: Tensor | None,  # [heads]
    options: list[float],  # scale, window, softcap; 0 is none
) -> Tensor:  # [tokens, heads, dim]
    (jobs, bits, positions), (scale, window, softcap) = seen, options
    q = q.contiguous()
    out = torch.zeros_like(q)
    given = Attention(
        q.data_ptr(), keys.data_ptr(), values.data_ptr(), 0 if sinks is None else sinks.data_ptr(), jobs.data_ptr(),
        bits.data_ptr(), positions.data_ptr(), out.data_ptr(), jobs.shape[0], q.shape[1], keys.shape[1], q.shape[2],
        bits.shape[1], int(window), scale, softcap,
    )  # fmt: skip
    _library().few_rows_attention(ctypes.byref(given))
    return out


def _library() -> ctypes.CDLL:
    found = library()
    assert found is not None, "whoever uses these operators has asked for the library"
    return found


# The plain way to define operators: `custom_op` adds checks to every call, and there are five calls in a layer.
OPS = torch.library.Library("outpace_cpu", "DEF")
OPS.define("linears(Tensor x, Tensor[] weights, Tensor[] scales, Tensor?[] biases) -> Tensor")
OPS.define("attend(Tensor q, Tensor keys, Tensor values, Tensor[] seen, Tensor? sinks, float[] options) -> Tensor")
OPS.impl("linears", linears, "CPU")
OPS.impl("attend", attend, "CPU")
OPS.impl(
    "linears",
    lambda x, weights, scales, biases: x.new_empty(*x.shape[:-1], sum(w.shape[0] for w in weights)),
    "Meta",
)
OPS.impl("attend", lambda q, *rest: torch.empty_like(q, memory_format=torch.contiguous_format), "Meta")
