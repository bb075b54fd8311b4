"""C++ files of the package, compiled once for each machine and kept in the cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outpace.storage.files import cache_dir

# No -ffast-math: the compiler would then order the sums of one row in one way, and those of four rows in another.
PLAIN = ["-O3", "-std=c++20", "-fno-math-errno", "-fno-trapping-math", "-fPIC"]
NATIVE = ["-march=native", "-mprefer-vector-width=512"]  # not every compiler knows these


def compiled(source: Path, compile: Sequence[str] = (), link: Sequence[str] = (), about: str = "") -> Path | None:
    """Return the shared library of a source file, or None where no C++ compiler can make it.

    `about` names what else the library was made from, such as the version of the headers.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None or os.name != "posix":
        return None
    made_by = [compiler, _processor(), about]
    identity = [source.read_text(encoding="utf-8"), *made_by, *PLAIN, *NATIVE, *compile, *link]
    name = f"{source.stem}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.so"
    library = cache_dir() / "kernels" / name
    try:
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            _build(compiler, source, library, compile, link)
    except (OSError, subprocess.CalledProcessError):
        return None
    return library


def _processor() -> str:
    """Describe the processor. A cache folder may be shared by machines whose instructions differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.processor()} {platform.node()}"
    kinds = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _build(compiler: str, source: Path, library: Path, compile: Sequence[str], link: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        compiled_file, shared = Path(scratch) / "code.o", Path(scratch) / library.name
        rest = [*PLAIN, *compile, "-c", str(source), "-o", str(compiled_file)]
        try:
            _run(compiler, *NATIVE, *rest)
        except subprocess.CalledProcessError:
            _run(compiler, *rest)
        _run(compiler, "-shared", str(compiled_file), "-o", str(shared), *link)
        os.replace(shared, library)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
