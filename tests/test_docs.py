"""Documentation that runs: examples are executed, generated tables are compared with the registry."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from outpace import registry
from outpace.api.model import Model
from outpace.cli.display import methods_markdown
from outpace.core.lm import LM
from outpace.testing import ByteTokenizer, ToyLM
from tests import test_lossless

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
    assert methods_markdown() in (ROOT / "README.md").read_text(), "paste the output of `outpace methods --markdown`"


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


def test_the_examples_of_several_callers_run(smollm2: Model) -> None:
    threads, tasks = blocks("docs/guide/several-callers.md")
    scope: dict[str, object] = {"lm": smollm2, "prompts": ["One", "Two", "Three"], "first": "One", "second": "Two"}
    exec(threads, scope)
    assert len(scope["answers"]) == 3  # type: ignore[arg-type]
    scope["prompt"] = "One"
    exec("async def run():\n" + "\n".join(f"    {line}" for line in tasks.splitlines()) + "\n    return answer", scope)
    assert asyncio.run(scope["run"]()).tokens == scope["answers"][0].tokens  # type: ignore[operator, index]


def test_links_of_the_documentation_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_method_policy_and_verifier_is_documented() -> None:
    text = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    for name in [*registry.METHODS, *registry.POLICIES, *registry.VERIFIERS]:
        assert f"`{name}`" in text, name
