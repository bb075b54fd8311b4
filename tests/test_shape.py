"""The shape of the code is a promise too: rooms that import one way, small files, names that occur once."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import outpace

ROOT = Path(outpace.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
ROOMS: dict[str, list[str]] = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["outpace"]["rooms"]
FREE = {"errors", "version"}  # for all rooms
ALL = "*"  # every room above
MOST_LINES, MOST_FUNCTION, MOST_PARAMETERS = 320, 60, 6
MOST_KERNEL = 70  # lines: a kernel cannot be cut wherever one likes
MOST_FILES = 15  # in a folder
MOST_CORE = 1500  # lines

# Signatures that are not ours to choose: Transformers calls these. A command's parameters are its flags.
FOREIGN = {
    ("models/hf/attention.py", "attend"),
    ("heads/chain_attention.py", "attend"),
    ("api/custom_generate.py", "decode"),
}
CHOICES = {("api/load.py", "load")}  # a keyword for each thing that a user may choose
KERNEL = "jit"  # what runs on a GPU is handed every size and pointer
COMMAND = "reports_errors"  # the decorator of every command

# Inside `models` the same holds for its parts.
RUNTIMES = [
    "embeddings",
    "quantized",
    "adapters",
    "memory",
    "gpu_memory",
    "transfer",
    "segment",
    "slots",
    "cacheless",
    "cache",
    "early_exit",
    "kernels",
    "hf",
    "compiled",
    "head_lm",
    "adapt",
    "tensor_parallel",
    "gguf",
]
WITHOUT_TRANSFORMERS = ["core", "sampling", "verifiers", "policies", "threads", "storage", "registry", "testing"]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_of(path) for path in FILES}


def imports(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports, at the top or inside of a function; for types alone does not count."""
    tree = ast.parse(path.read_text())
    types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole.removeprefix("outpace.") in MODULES else node.module


def ours(path: Path) -> Iterator[list[str]]:
    for name in imports(path):
        if name.startswith("outpace."):
            yield name.removeprefix("outpace.").split(".")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_sizes(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") <= MOST_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
            command = COMMAND in decorators
            assert node.end_lineno is not None
            most = MOST_KERNEL if KERNEL in decorators else MOST_FUNCTION
            assert node.end_lineno - (node.body[0] if command else node).lineno < most, node.name
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            counted = [a for a in arguments if a.arg not in ("self", "cls")]
            if not decorators & {COMMAND, KERNEL} and (name_of(path), node.name) not in FOREIGN | CHOICES:
                assert len(counted) <= MOST_PARAMETERS, node.name


def test_folders_are_small_and_so_is_the_core() -> None:
    counts = Counter(path.parent for path in FILES)
    assert not {name_of(folder): count for folder, count in counts.items() if count > MOST_FILES}
    assert sum(path.read_text().count("\n") for path in (ROOT / "core").glob("*.py")) <= MOST_CORE


def test_the_listing_is_the_list_of_rooms() -> None:
    there = {path.stem if path.is_file() else path.name for path in ROOT.iterdir() if not path.name.startswith("__")}
    assert there == {*ROOMS, *FREE, "py"}  # py.typed
    for room, allowed in ROOMS.items():
        above = list(ROOMS)[: list(ROOMS).index(room)]
        assert set(allowed) <= {*above, ALL}, f"{room} may import what stands above it"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_what_they_may(room: str) -> None:
    above = list(ROOMS)[: list(ROOMS).index(room)]
    allowed = set(above if ROOMS[room] == [ALL] else ROOMS[room])
    used = set[str]()
    for path in FILES:
        if module_of(path).split(".")[0] == room:
            used |= {parts[0] for parts in ours(path)}
    assert used - FREE - {room} <= allowed
    assert ROOMS[room] == [ALL] or allowed <= used, "what a room does not use is not on its list"


def test_tools_do_not_import_each_other() -> None:
    tools = {"verify", "bench", "advise", "train"}
    for path in FILES:
        own = module_of(path).split(".")[0]
        for parts in ours(path) if own in tools else ():
            assert parts[0] not in tools - {own} or (own, parts[0]) == ("advise", "bench"), f"{path}: {parts}"


def test_methods_do_not_import_each_other() -> None:
    for path in FILES:
        for parts in ours(path) if module_of(path).startswith("methods") else ():
            assert parts[0] != "methods", path


def test_runtimes_import_one_way() -> None:
    for path in FILES:
        own = module_of(path).split(".")
        for parts in ours(path) if own[0] == "models" and len(own) > 1 else ():
            if parts[0] == "models" and len(parts) > 1:
                assert RUNTIMES.index(parts[1]) <= RUNTIMES.index(own[1]), f"{path}: {parts}"


def test_the_loop_runs_without_transformers() -> None:
    """In a process in which Transformers cannot be imported."""
    rooms = [module for module in sorted(MODULES) if module.split(".")[0] in WITHOUT_TRANSFORMERS]
    # A grammar needs llguidance's binding for Transformers, which it imports when it is used.
    program = "import sys; sys.modules['transformers'] = None; import importlib\n" + "\n".join(
        f"importlib.import_module('outpace.{module}')" for module in rooms
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for path in FILES:
        own = module_of(path).split(".")[0]
        if own in WITHOUT_TRANSFORMERS and name_of(path) != "sampling/grammar.py":
            assert not any(name.startswith("transformers") for name in imports(path)), path


def test_class_names_occur_once() -> None:
    found = Counter(
        node.name for path in FILES for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
    )
    assert not {name: count for name, count in found.items() if count > 1}


def test_public_names() -> None:
    assert sorted(outpace.__all__, key=str) == sorted(set(outpace.__all__))
    for name in outpace.__all__:
        assert hasattr(outpace, name)
    assert set(outpace._NAMES) == set(outpace.__all__) - {"__version__"}
    own = {n for n, v in vars(outpace).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert own - {"TYPE_CHECKING", "Any", "import_module"} <= set(outpace.__all__)
    for name in outpace.__all__:
        assert getattr(outpace, name, None) is not None and name in dir(outpace)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    module = f"outpace.{module_of(path)}".removesuffix(".__init__")
    if not module.endswith("__main__"):
        assert importlib.import_module(module).__doc__
