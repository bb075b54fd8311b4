"""The shape of the code is a promise too: small files, short functions, few parameters, imports that point one way."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import outpace

ROOT = Path(outpace.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MOST_LINES, MOST_FUNCTION, MOST_PARAMETERS = 320, 60, 6
MOST_KERNEL = 70  # lines: a kernel cannot be cut wherever one likes

# Signatures that are not ours to choose: Transformers calls these. A command's parameters are its flags.
FOREIGN = {("models/attention.py", "attend"), ("heads/unrolled.py", "attend"), ("dropin.py", "decode")}
CHOICES = {("loading.py", "load")}  # a keyword for each thing that a user may choose
KERNEL = "jit"  # what runs on a GPU is handed every size and pointer
COMMAND = "reports_errors"  # the decorator of every command

# A module may import those of its own layer and of the layers above it in this list.
LAYERS = [
    {"version", "errors", "noise", "jsonl", "files", "worker", "compute_threads", "settings"},
    {"registry", "catalogue", "request"},
    {"tree", "stats"},
    {"sequence"},
    {"sample", "processors", "grammar", "drafter", "text", "successors", "grafting", "calibrated"},
    {"verify", "policy", "costs", "calibration", "meter", "pool", "rota", "goodput"},
    {"models", "shelf"},
    {"heads"},
    {"scheduler", "engine", "testing", "outlook", "growth", "slots", "linked", "headed", "layers", "slim", "bridge"},
    {"methods", "trace"},
    {"stream", "api", "calibrate"},
    {"loading", "gguf", "rollouts"},
    {"bench"},
    {"train"},
    {"proof", "advise"},
    {"dropin", "display", "show", "cli", "__init__", "__main__"},
]
HEAVY = {"models", "shelf", "heads", "loading", "gguf", "train", "dropin", "grammar", "cli"}  # may import transformers


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def layer_of(module: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if module in layer)


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


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    tree = ast.parse(path.read_text())
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    lazy = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.If) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom | ast.Import) or id(node) in lazy:
            continue
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        if isinstance(node, ast.ImportFrom) and node.module == "outpace":
            names = [f"outpace.{a.name}" for a in node.names]
        for name in names:
            if name.startswith("transformers"):
                assert own in HEAVY, f"{name} outside of an adapter"
            if name.startswith("outpace."):
                assert layer_of(name.split(".")[1]) <= layer_of(own), name
                assert own != "methods" or name.split(".")[1] != "methods", "methods do not import each other"


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
    dotted = "outpace." + name_of(path).removesuffix(".py").replace("/", ".")
    module = dotted.removesuffix(".__init__")
    if not module.endswith("__main__"):
        assert importlib.import_module(module).__doc__
