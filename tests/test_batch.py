"""outpace batch: the server's own answers, file to file, and nothing lost or twice after a kill."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from outpace.api.model import Model
from outpace.cli.common import app
from outpace.cli.serving import model as serving
from outpace.serve.batch.files import BatchFiles
from outpace.serve.batch.lines import LONGEST
from tests.serving import live
from tests.tiny_tokenizers import random_model

CHAT = "/v1/chat/completions"


def line(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    given = {"messages": [{"role": "user", "content": f"{name}, fox?"}], "max_tokens": 12} if url == CHAT else {}
    return {"custom_id": name, "method": "POST", "url": url, "body": {**given, **body}}


def write(path: Path, lines: list[Any]) -> None:
    texts = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines]
    path.write_bytes(b"".join(text + b"\n" for text in texts))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def text_of(record: dict[str, Any]) -> str:
    """The text of an answer of any API."""
    body = record["response"]["body"]
    if "output" in body:
        return str(body["output"][0]["content"][0]["text"])
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


class Job:
    """A batch in a folder, with a tiny model."""

    def __init__(self, folder: Path, model: Model):
        self.source, self.output, self.model = folder / "in.jsonl", folder / "out.jsonl", model
        self.errors = folder / "out.errors.jsonl"

    def run(self, *arguments: str, source: Path | None = None) -> Result:
        return CliRunner().invoke(app, ["batch", str(source or self.source), str(self.output), *arguments])

    @property
    def texts(self) -> dict[str, str]:
        return {record["custom_id"]: text_of(record) for record in read(self.output)}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job(tmp_path, random_model("tiktoken"))
    monkeypatch.setattr(serving, "load_model", lambda name, how: made.model)
    return made


def test_answers_are_those_of_the_server_and_of_generate(job: Job) -> None:
    lines = [
        line("chat", seed=7),
        line("sampled", seed=8, temperature=0.8, top_p=0.9, logprobs=True),
        line("several", seed=9, n=3),
        line("off", seed=7, speculation="off", messages=[{"role": "user", "content": "chat, fox?"}]),
        line("completion", "/v1/completions", prompt="The quick", seed=3, max_tokens=9),
        line("response", "/v1/responses", input="The fox?", seed=4, max_output_tokens=9),
    ]
    write(job.source, lines)
    done = job.run("--method", "suffix")
    assert done.exit_code == 0, done.output
    found = {record["custom_id"]: record for record in read(job.output)}
    assert found.keys() == {each["custom_id"] for each in lines} and not job.errors.exists()
    with live(random_model("tiktoken"), method="suffix") as server:
        for each in lines:
            record = found[each["custom_id"]]
            served = {"response": {"body": server.post(each["url"], each["body"]).json()}}
            assert record["error"] is None and record["id"].startswith("batch_req_")
            assert record["response"]["status_code"] == 200
            assert record["response"]["request_id"] == record["response"]["body"]["id"]
            assert text_of(record) == text_of(served)
            assert record["response"]["body"].keys() == served["response"]["body"].keys()
    plain = job.model.generate("The quick", method="plain", temperature=1.0, seed=3, max_tokens=9)
    assert job.texts["completion"] == plain.text
    assert job.texts["chat"] == job.texts["off"]


def test_defaults_of_the_command_hold_for_lines_without_them(job: Job) -> None:
    write(job.source, [line("a"), line("b", seed=5, temperature=0.5)])
    given = ("--set", "seed=5", "--set", "temperature=0.5", "--max-tokens", "4", "--served-model-name", "gpt-4o-mini")
    done = job.run(*given, "--json")
    found = {record["custom_id"]: record["response"]["body"] for record in read(job.output)}
    assert {body["usage"]["completion_tokens"] for body in found.values()} == {4}
    assert {body["model"] for body in found.values()} == {"gpt-4o-mini"}
    summary = json.loads(done.stdout)
    assert not done.stderr
    assert (summary["lines"], summary["answered"], summary["failed"], summary["left"]) == (2, 2, 0, 0)
    assert summary["completion_tokens"] == 8 and summary["errors"] is None
    job.output.unlink()
    write(job.source, [line("a", messages=[{"role": "user", "content": "same"}], seed=i) for i in (1,)])
    job.run("--set", "seed=1")
    first = job.texts
    job.output.unlink()
    write(job.source, [line("a", messages=[{"role": "user", "content": "same"}])])
    job.run("--set", "seed=1")
    assert job.texts == first


BAD: list[tuple[Any, str]] = [
    (b"{", "not valid JSON"),
    (b"[1]", "valid dictionary"),
    (b"[" * 100_000, "not valid JSON"),
    (b'"\xff"', "not valid JSON"),
    ({"custom_id": "x", "url": CHAT, "body": {}}, "method: Field required"),
    ({**line("x"), "method": "GET"}, "method: "),
    ({**line("x"), "url": "/v1/embeddings"}, "url: "),
    ({**line("x"), "custom_id": ""}, "custom_id: "),
    ({**line("x"), "custom_id": 7}, "custom_id: "),
    ({**line("x"), "custom_id": "\ud800"}, "custom_id: "),
    ({**line("x"), "body": "text"}, "body: "),
    ({**line("x"), "priority": 1}, "unknown member 'priority'"),
    (line("x", stream=True), "a batch has no streams"),
    (line("good"), "'good' stands in line 1 already"),
    (b'{"custom_id": "' + b"x" * (LONGEST + 10) + b'"}', "longer than"),
]
REFUSED = [
    line("model", model="other"),
    line("unknown", temprature=1),
    line("half", messages=[{"role": "user", "content": "\ud800"}]),
    line("many", n=99),
    line("empty", messages=[]),
]


def test_bad_lines_are_reported_and_the_others_are_answered(job: Job) -> None:
    write(job.source, [line("good", seed=1), b"", *(bad for bad, _ in BAD), *REFUSED, line("last", seed=1)])
    done = job.run()
    assert done.exit_code == 1
    assert job.texts.keys() == {"good", "last"}
    errors = read(job.errors)
    assert "line 3: not valid JSON" in done.stderr and f"{len(BAD) + len(REFUSED)} without an answer" in done.stderr
    by_line = {record["error"]["line"]: record for record in errors if record["error"] is not None}
    for number, (_, reason) in enumerate(BAD, 3):
        assert by_line[number]["error"]["code"] == "invalid_line" and by_line[number]["response"] is None
        assert reason in by_line[number]["error"]["message"]
    refused = {r["custom_id"]: r["response"] for r in errors if r["response"] is not None}
    assert {name: response["status_code"] for name, response in refused.items()} == {
        "model": 404, "unknown": 400, "half": 400, "many": 400, "empty": 400,
    }  # fmt: skip
    assert refused["unknown"]["body"]["error"]["message"] == "unknown field 'temprature'"
    before = job.output.read_bytes()
    write(job.source, [line("good"), line("last"), line("model")])  # repaired, with an id that failed before
    again = job.run("--json")
    assert again.exit_code == 0 and job.output.read_bytes().startswith(before)
    assert json.loads(again.stdout)["done_before"] == 2 and not job.errors.exists()


def test_a_batch_that_is_done_loads_no_model(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    write(job.source, [line("a")])
    assert job.run().exit_code == 0
    monkeypatch.setattr(serving, "load_model", None)
    again = job.run()
    assert again.exit_code == 0 and "0 of 1 lines answered, 1 before" in again.stderr


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda job: write(job.output, [{"custom_id": "z", "response": {"body": {}}}]), "'z', which is not in"),
        (lambda job: write(job.output, [line("a")]), "line 1 is no answer of a batch"),
        (lambda job: write(job.output, [b"my notes", b"more"]), "line 1 is no answer of a batch"),
        (lambda job: job.source.rename(job.output), "no such file"),
        (lambda job: job.output.symlink_to(job.source), "is the input"),
        (lambda job: job.errors.symlink_to(job.source), "is the input"),
        (lambda job: job.output.mkdir(), "it is a folder"),
    ],
)
def test_files_that_do_not_belong_together_are_refused_and_kept(
    job: Job, prepare: Callable[[Job], None], message: str
) -> None:
    write(job.source, [line("a")])
    prepare(job)
    before = {path: path.read_bytes() for path in (job.source, job.output) if path.is_file()}
    done = job.run()
    assert done.exit_code in (1, 2) and message in done.stderr
    assert all(path.read_bytes() == data for path, data in before.items())


def test_one_process_at_a_time(job: Job) -> None:
    write(job.source, [line("a")])
    with BatchFiles(job.source, job.output):
        done = job.run()
    assert done.exit_code == 2 and "another process is writing" in done.stderr


def test_a_torn_line_is_answered_again(job: Job) -> None:
    write(job.source, [line(str(i), seed=i) for i in range(6)])
    job.run()
    wanted, whole = job.texts, job.output.read_bytes()
    for size in random.Random(0).sample(range(len(whole)), 8):
        job.output.write_bytes(whole[:size])
        assert job.run().exit_code == 0
        assert job.texts == wanted and len(read(job.output)) == 6
        assert job.output.read_bytes().startswith(whole[: whole.rfind(b"\n", 0, size) + 1])


# Forked children, because each import of torch takes seconds; the parent has no threads. Each child is killed in one of
# its writes: before it, in the middle, or after it.
PROGRAM = """
import os, random, signal, sys
from outpace.cli.serving import model as serving
from outpace.cli.common import app
from outpace.serve.batch import files, run
from tests.tiny_tokenizers import random_model

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored
serving.load_model = lambda name, how: random_model("tiktoken")
write = files.WholeLines.write

def end_in(count, kill, share):
    left = [count]
    def written(self, line):
        left[0] -= 1
        if not left[0]:
            self.file.write(line[: round(share * len(line))])
            os.kill(os.getpid(), kill)
        else:
            write(self, line)
    files.WholeLines.write = written

def run_child(*end):
    child = os.fork()
    if not child:
        end_in(*end)
        app(["batch", *sys.argv[1:], "--json", "--method", "plain"])
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

dice = random.Random(1)
for share in (0, 0.3, 0.999, 1, dice.random()):
    run_child(dice.randint(1, 9), signal.SIGKILL, share)
run_child(5, signal.SIGINT, 1)
run_child(0, 0, 0)
"""


def test_a_run_that_is_killed_goes_on_with_nothing_lost_and_nothing_twice(job: Job) -> None:
    # More lines than a run asks for at a time are left when it is interrupted, so it cannot have ended meanwhile.
    asked = [line(str(i), seed=i, max_tokens=8, temperature=0.9) for i in range(90)]
    write(job.source, asked)
    given = [sys.executable, "-c", PROGRAM, str(job.source), str(job.output)]
    done = subprocess.run(given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [json.loads(text) for text in done.stdout.splitlines()]
    assert [each for each in told if isinstance(each, int)] == [-9] * 5 + [130, 0]
    interrupted, last = (each for each in told if isinstance(each, dict))
    assert interrupted["left"] == last["answered"] > 0 == last["left"]
    ids = [record["custom_id"] for record in read(job.output)]
    assert sorted(ids) == sorted(each["custom_id"] for each in asked)
    found = job.texts
    job.output.unlink()
    assert job.run().exit_code == 0
    assert job.texts == found


def test_the_plan_of_a_large_file_holds_no_texts(job: Job) -> None:
    text = "x" * 10_000
    write(job.source, [line(str(i), user=text) for i in range(2000)])
    tracemalloc.start()
    try:
        with BatchFiles(job.source, job.output) as files:
            assert files.total == 2000
            assert sum(len(each.body["user"]) for each in files.lines()) == 2000 * len(text)
        assert tracemalloc.get_traced_memory()[1] < 2 * 2**20
    finally:
        tracemalloc.stop()
