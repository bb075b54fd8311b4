"""Build and load few_rows.cpp: CPU operators for linear layers and attention on a few float32 rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from outpace.storage.native_code import compiled

SOURCE = Path(__file__).with_name("few_rows.cpp")
# A compiler that fuses products with sums of its own accord does so for one type of weight and not for another.
EXACT = ["-ffp-contract=off"]

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
    home = Path(torch.__file__).parent
    headers = [f"-I{home / 'include'}", f"-I{home / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    # Link with torch's own OpenMP: a second one would have its own threads, which compete for the cores.
    lib = home / "lib"
    own = next(iter(sorted(lib.glob("libgomp*"))), None)
    openmp = [str(own)] if own is not None else ["-fopenmp"]
    torch_libraries = [f"-L{lib}", f"-Wl,-rpath,{lib}", "-ltorch_cpu", "-lc10"]
    library = compiled(SOURCE, ["-fopenmp", *EXACT, *headers], [*torch_libraries, *openmp], about=torch.__version__)
    try:
        if library is not None:
            torch.ops.load_library(library)
    except OSError:
        return False
    return library is not None
