"""The command line as a newcomer uses it, wrong arguments included."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from outpace import registry, shelf
from outpace.cli import app
from outpace.errors import OutpaceError
from tests.conftest import SMOLLM2

runner = CliRunner()


def test_help_names_every_command() -> None:
    shown = runner.invoke(app, ["--help"])
    assert shown.exit_code == 0
    assert all(name in shown.output for name in ("generate", "chat", "methods", "shelf"))


def test_methods_come_from_the_registry() -> None:
    found = json.loads(runner.invoke(app, ["methods", "--json"]).output)
    assert list(found["methods"]) == list(registry.methods())
    assert set(found["policies"]) == set(registry.POLICIES)
    assert set(found["verifiers"]) == set(registry.VERIFIERS)
    assert found["methods"]["ngram"]["options"]["max_n"] == 4
    assert not found["verifiers"]["typical"]["lossless"]
    table = runner.invoke(app, ["methods"])
    assert all(name in table.output for name in registry.methods())


def test_shelf_lists(smollm2: object) -> None:
    rows = json.loads(runner.invoke(app, ["shelf", "--json"]).output)
    assert rows[0]["name"] == SMOLLM2 and rows[0]["cached"]
    assert "SmolLM2" in runner.invoke(app, ["shelf"]).output
    wrong = runner.invoke(app, ["shelf", "smollm2-135m"])
    assert wrong.exit_code == 2
    assert "did you mean 'smollm2-135m-instruct'" in wrong.stderr.replace("\n", " ")


def test_generate_json_equals_plain(smollm2: object) -> None:
    def run(method: str) -> dict[str, object]:
        done = runner.invoke(app, ["generate", "Say hi.", "--method", method, "--max-tokens", "12", "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    plain, drafted = run("plain"), run("lookahead")
    assert plain["tokens"] == drafted["tokens"] and plain["text"] == drafted["text"]
    assert drafted["lossless"] is True


def test_generate_shows_text_and_statistics(smollm2: object) -> None:
    done = runner.invoke(
        app, ["generate", "-", "--max-tokens", "8", "-o", "max_n=2", "--method", "ngram"], input="Say hi."
    )
    assert done.exit_code == 0, done.output
    assert "tokens per pass" in done.stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", " "], "the prompt is empty"),
        (["generate", "hi", "--method", "ngrm"], "did you mean 'ngram'"),
        (["generate", "hi", "-o", "max_n"], "not of the form name=value"),
        (["generate", "hi", "-o", "maxn=3", "--method", "ngram"], "did you mean 'max_n'"),
        (["generate", "hi", "--model", "no/such/folder"], "cannot load 'no/such/folder'"),
        (["generate", "hi", "--dtype", "float31"], "is not a torch dtype"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], message: str, smollm2: object) -> None:
    done = runner.invoke(app, arguments)
    assert done.exit_code in (1, 2)
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.output + done.stderr


def test_an_error_is_shown_to_the_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OutpaceError("pip install 'outpace[shelf]' [/red] [")

    monkeypatch.setattr(shelf, "fetch", fail)
    done = runner.invoke(app, ["shelf", SMOLLM2])
    assert done.exit_code == 1
    assert done.stderr == "error: pip install 'outpace[shelf]' [/red] [\n"


def test_chat_remembers_and_ends(smollm2: object) -> None:
    said = "My name is Ada.\nWhat is my name?\n"
    done = runner.invoke(app, ["chat", "--max-tokens", "16", "--method", "suffix"], input=said)
    assert done.exit_code == 0, done.output
    assert done.output.count("tokens per pass") + done.output.count("tokens per\npass") >= 2
