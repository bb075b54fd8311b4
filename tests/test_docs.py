"""Documentation that runs: examples are executed, generated tables are compared with the registry."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from outpace import registry
from outpace.api.model import Model
from outpace.cli.display import methods_markdown
from outpace.core.lm import LM
from outpace.serve.batch.engine import BatchEngine
from outpace.serve.batch.files import BatchFiles
from outpace.serve.batch.run import run
from outpace.serve.settings import ServeSettings
from outpace.serve.telemetry.metrics import COUNTERS, GAUGES, HISTOGRAMS
from outpace.testing import ByteTokenizer, ToyLM
from outpace.tracing.trace import read
from tests import test_lossless
from tests.serving import live
from tests.tiny_tokenizers import random_model

ROOT = Path(__file__).parent.parent


def blocks(path: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("setting", ["greedy", "sampled", "penalties"])
def test_the_example_method_passes_the_registry_test(
    setting: str, monkeypatch: pytest.MonkeyPatch, toy: Model, toy_draft: LM
) -> None:
    source, use = blocks("docs/internals/add-a-method.md")
    module = ModuleType("repeat_last")
    monkeypatch.setitem(sys.modules, "repeat_last", module)
    exec(source, module.__dict__)
    monkeypatch.setitem(registry.METHODS, "repeat_last", "repeat_last:RepeatLast")
    test_lossless.test_toy("repeat_last", setting, toy, toy_draft)
    model = Model(ToyLM(vocab=257), ByteTokenizer())
    scope = {"lm": model, "RepeatLast": module.RepeatLast}
    exec(use, scope)
    assert scope["out"].tokens == model.generate("ha ha ha", method="plain").tokens  # type: ignore[attr-defined]


def test_the_methods_table_of_the_readme_is_generated() -> None:
    for page, options in (("README.md", False), ("docs/methods/overview.md", True)):
        assert methods_markdown(options) in (ROOT / page).read_text(), "run `python docs/readme.py`"


def test_the_example_of_the_readme_runs(smollm2: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    import outpace

    monkeypatch.setattr(outpace, "load", lambda name: smollm2)
    scope: dict[str, object] = {}
    exec(blocks("README.md")[0], scope)
    assert scope["out"].tokens == scope["plain"].tokens  # type: ignore[attr-defined]


def test_the_example_of_verify_runs(toy: Model) -> None:
    scope: dict[str, object] = {"lm": toy}
    exec(blocks("docs/guide/verify.md")[0], scope)
    assert {check.subject for check in scope["checks"]} == {"plain", "suffix"}  # type: ignore[attr-defined]


def test_the_example_of_bench_runs() -> None:
    (source,) = blocks("docs/guide/bench.md")
    model = Model(ToyLM(vocab=257, max_length=4096), ByteTokenizer(), name="toy")
    scope: dict[str, Any] = {"lm": model}
    exec(source.replace("max_tokens=32", "max_tokens=4"), scope)
    assert {each.contestant for each in scope["runs"]} == {"plain", "suffix"}


def test_the_examples_of_several_callers_run(smollm2: Model) -> None:
    threads, tasks = blocks("docs/guide/several-callers.md")
    scope: dict[str, object] = {"lm": smollm2, "prompts": ["One", "Two", "Three"], "first": "One", "second": "Two"}
    exec(threads, scope)
    assert len(scope["answers"]) == 3  # type: ignore[arg-type]
    scope["prompt"] = "One"
    exec("async def run():\n" + "\n".join(f"    {line}" for line in tasks.splitlines()) + "\n    return answer", scope)
    assert asyncio.run(scope["run"]()).tokens == scope["answers"][0].tokens  # type: ignore[operator, index]


def test_the_examples_of_serve_run() -> None:
    page = "docs/guide/serve.md"
    name = "smollm2-135m-instruct"
    with live(random_model("tiktoken"), names=(name,)) as server:
        for source in blocks(page):
            scope: dict[str, Any] = {}
            exec(source.replace("http://localhost:8000", server.url), scope)
            for client in scope.values():  # the examples leave that to the end of the program
                if hasattr(client, "close") and not isinstance(client, type):
                    client.close()
        if shutil.which("curl"):
            command = blocks(page, "bash")[0].replace("http://localhost:8000", server.url)
            done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
            assert json.loads(done.stdout)["model"] == name
        routes = server.get("/openapi.json").json()["paths"].keys()
    text = (ROOT / page).read_text()
    assert all(f"`{route}`" in text for route in routes - {"/v1/models/{name}"})
    for metric in (*COUNTERS, *GAUGES, *HISTOGRAMS):
        assert f"`{metric}`" in text, metric


def test_the_example_of_the_playground_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (source,) = blocks("docs/guide/playground.md")
    monkeypatch.chdir(tmp_path)
    with live(random_model("tiktoken"), names=("smollm2-135m-instruct",)) as server:
        exec(source.replace("http://localhost:8000", server.url), {})
    (request,) = read("out.jsonl").requests
    assert len(request.tokens) == 20 and request.sampling["seed"] == 7


def test_the_example_of_batch_runs(tmp_path: Path) -> None:
    asked, answered = blocks("docs/guide/batch.md", "json")
    (tmp_path / "in.jsonl").write_text(asked)
    with BatchFiles(tmp_path / "in.jsonl", tmp_path / "out.jsonl") as files:
        run(BatchEngine(random_model("tiktoken"), ServeSettings(("tiny",), "tiny")), files.lines(), files.add)
    (found,) = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    shown = json.loads(answered)
    assert found.keys() == shown.keys() and found["response"].keys() == shown["response"].keys()
    assert found["custom_id"] == shown["custom_id"]


def script(name: str) -> dict[str, Any]:
    """What a script of docs defines."""
    return runpy.run_path(str(ROOT / "docs" / f"{name}.py"))


def test_links_of_the_documentation_lead_somewhere() -> None:
    assert script("links")["broken"]() == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    links = script("links")
    page = tmp_path / "page.md"
    page.write_text("# A title, with `code`\n\n[a](none.md) [b](#a-title-with-code) [c](#no) `[d](code.md)`\n")
    assert list(links["links"](page)) == [(tmp_path / "none.md", ""), (page, "a-title-with-code"), (page, "no")]
    assert links["anchors"](page) == {"a-title-with-code"}


def test_links_lead_somewhere_on_the_site_too() -> None:
    """The site has pages for README and source files, and links are moved there; a build needs MkDocs."""
    hooks, links = script("hooks"), script("links")
    files = {*links["pages"](), *links["linked_files"](), *(ROOT / "docs").rglob("*.png")}
    there = {hooks["address"](file) for file in files}
    for page in links["pages"]():
        place = hooks["address"](page)
        text = hooks["on_page_markdown"](page.read_text(), SimpleNamespace(file=SimpleNamespace(src_uri=place)))
        for target, _ in links["LINK"].findall(links["without_code"](text)):
            assert not target or os.path.normpath(Path(place).parent / target) in there, f"{place}: {target}"


def test_the_readers_test_asks_five_questions_of_every_room() -> None:
    text = "".join((ROOT / "docs/internals" / f"readers-test{part}.md").read_text() for part in ("", "-tools"))
    rooms = dict(re.findall(r"## (\w+)\n\n((?:- .*\n)+)", text))
    assert set(rooms) == set(script("rooms")["names"]())
    for room, questions in rooms.items():
        answers = re.findall(r"^- .*\? `([^`]+)`$", questions, flags=re.MULTILINE)
        assert len(answers) == 5, room
        for answer in answers:
            assert (ROOT / "outpace" / room / answer).exists() or answer == f"{room}.py", f"{room}: {answer}"


def test_the_map_of_the_readme_is_generated() -> None:
    assert script("rooms")["listing"]() in (ROOT / "README.md").read_text(), "run `python docs/readme.py`"


def test_the_readme_is_short() -> None:
    """Its tables and its map are counted too."""
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_pages_are_short_and_in_the_map() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        limit = 700 if page.parent.name == "results" else 1500
        text = re.sub(r"<!-- bench:.*?<!-- /bench:\w+ -->", "", page.read_text(), flags=re.DOTALL)
        assert page.name == "log.md" or len(text.split()) <= limit, page
        name = page.relative_to(ROOT / "docs").as_posix()
        assert f"- {name}\n" in (ROOT / "mkdocs.yml").read_text() or name == "log.md", f"{name}: not in mkdocs.yml"


def test_every_method_policy_and_verifier_is_documented() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    for name in [*registry.METHODS, *registry.POLICIES, *registry.VERIFIERS]:
        assert f"`{name}`" in text, name
