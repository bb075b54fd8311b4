"""The trace viewer: its data, its file, the terminal, and the page in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outpace.api.model import Model
from outpace.api.stream import Completion
from outpace.cli.common import app
from outpace.errors import OutpaceError
from outpace.testing import ByteTokenizer, ToyLM
from outpace.tracing.trace import Trace, TraceWriter, read, reason
from outpace.tracing.viewer import page, terminal

runner = CliRunner()
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>&lt;\u2028"
BROKEN_END = "the trace breaks off"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Completion]]:
    """A batch of two by trees, then one by chains."""
    path = tmp_path_factory.mktemp("show") / "trace.jsonl"
    model = Model(ToyLM(vocab=257), ByteTokenizer(), name="toy")
    with TraceWriter(path, model.tokenizer, model.name, probs=True) as writer:
        done = model.generate(["ab ab ab", "the cat"], method="recycling", max_tokens=24, trace=writer)
        done.append(model.generate("xyxyxyxy", method="ngram", max_tokens=16, trace=writer))
    return path, done


class Lines:
    """A trace written by hand."""

    def __init__(self, pieces: dict[int, str], **request: Any):
        asked = {"id": 0, "method": "m", "verifier": "match", "policy": "fixed", "lossless": True, "sampling": {}}
        self.lines: list[dict[str, Any]] = [
            {"type": "header", "format": "outpace-trace", "version": 1, "model": "by hand", "versions": {}},
            {"type": "pieces", "pieces": pieces},
            {"type": "request", **asked, "prompt": [0], **request},
        ]

    def add(self, tokens: list[int], parents: list[int], path: list[int], committed: list[int], **more: Any) -> Lines:
        by = ["", *["guesser"] * (len(tokens) - 1)]
        shape = {"tokens": tokens, "parents": parents, "by": by, "path": path, "committed": committed, "kept": path}
        spent = {"prefill": 0.0, "draft": 0.001, "score": 0.02, "verify": 0.002, "keep": 0.001}
        at = 0.03 * len(self.lines)
        self.lines.append({"type": "pass", "request": 0, "at": at, "rows": 1, "seconds": spent, **shape, **more})
        return self

    def write(self, path: Path) -> Path:
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        return path


def hostile(path: Path) -> Path:
    lines = Lines({0: "start", 1: HOSTILE, 2: "\x1b[31mred\x07", 3: ""}, method=HOSTILE, prompt=[0, 1], error=HOSTILE)
    by = ["", HOSTILE, HOSTILE]
    lines.add([0, 1, 2], [-1, 0, 0], [0, 1], [1, 2], by=by).add([2], [-1], [0], [3])
    return lines.write(path)


def text_of(trace: Trace, request: int) -> str:
    return "".join(trace.pieces[token] for token in trace.requests[request].tokens)


def test_the_data_agrees_with_the_completions(ran: tuple[Path, list[Completion]]) -> None:
    trace = read(ran[0])
    data = page.describe(trace)
    assert data["methods"] == "recycling, ngram" and data["verifiers"] == "match" and data["lossless"]
    assert data["totals"]["tokens"] == sum(done.stats.tokens for done in ran[1])
    for shown, request, done in zip(data["requests"], trace.requests, ran[1], strict=True):
        for name in ("tokens", "passes", "accepted", "drafted", "offered", "matched"):
            assert shown["stats"][name] == getattr(done.stats, name), name
        assert sum(p["accepted"] for p in shown["proposers"]) == done.stats.accepted
        assert sum(p["drafted"] for p in shown["proposers"]) == done.stats.drafted
        assert shown["own"] == done.stats.tokens - done.stats.accepted
        for drawn, record in zip(shown["passes"], request.passes, strict=True):
            assert len(drawn["sources"]) == len(record.committed)
            found = [data["reasons"][why] for why in drawn["why"]]
            assert found == [reason(record, node, trace.pieces) for node in range(len(record.tokens))]


def test_the_time_of_a_shared_pass_counts_once(ran: tuple[Path, list[Completion]]) -> None:
    trace = read(ran[0])
    first, second, third = ([sum(p.seconds.values()) for p in request.passes] for request in trace.requests)
    longer = max(first, second, key=len)
    assert page.describe(trace)["totals"]["seconds"] == pytest.approx(sum(longer) + sum(third))


def test_a_page_is_one_file_and_its_data_no_markup(tmp_path: Path) -> None:
    data = page.describe(read(hostile(tmp_path / "trace.jsonl")))
    text = page.html(data)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert found is not None and "<" not in found[1]
    assert json.loads(found[1])["sources"] == [HOSTILE]
    assert re.findall(r"https?://[^\"' ]+", text.replace(found[1], "")) == ["http://www.w3.org/2000/svg"]
    assert "src=" not in text.replace(found[1], "") and "@import" not in text


def test_a_page_is_written_whole_or_not_at_all(
    ran: tuple[Path, list[Completion]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "page.html"
    target.write_text("before")

    def fail(source: object, target: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OutpaceError, match="cannot write the page: no space left"):
            page.write(read(ran[0]), target)
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"] and target.read_text() == "before"
    page.write(read(ran[0]), target)
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"] and "<!DOCTYPE html>" in target.read_text()


def test_records_that_contradict_themselves_are_an_error_in_words(tmp_path: Path) -> None:
    lines = Lines({0: "a"}).add([0, 0], [-1, 7], [0], [0])
    with pytest.raises(OutpaceError, match="contradicts its format"):
        page.describe(read(lines.write(tmp_path / "trace.jsonl")))
    lines = Lines({0: "a"}).add([0], [-1], [0], [0], at=float("nan"))
    with pytest.raises(OutpaceError, match="a number that JSON cannot represent"):
        page.html(page.describe(read(lines.write(tmp_path / "trace.jsonl"))))


def test_settings_name_what_was_changed(tmp_path: Path) -> None:
    def settings(**sampling: Any) -> str:
        lines = Lines({0: "a"}, sampling=sampling)
        return page.describe(read(lines.write(tmp_path / "trace.jsonl")))["requests"][0]["settings"]

    assert settings(temperature=0.0, top_p=1.0) == "greedy"
    assert settings(temperature=0.0, presence_penalty=0.5) == "greedy, presence_penalty 0.5"
    assert settings(temperature=0.7, top_p=0.9, seed=4) == "temperature 0.7, top_p 0.9, seed 4"


def test_the_command_writes_beside_the_trace_and_opens(
    ran: tuple[Path, list[Completion]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    path = Path(shutil.copy(ran[0], tmp_path / "some.jsonl"))
    done = runner.invoke(app, ["show", str(path)])
    assert done.exit_code == 0 and done.stdout.strip() == str(tmp_path / "some.html")
    assert opened == [(tmp_path / "some.html").as_uri()]
    other = tmp_path / "other.html"
    done = runner.invoke(app, ["show", str(path), "--output", str(other), "--no-open"])
    assert done.exit_code == 0 and other.exists() and len(opened) == 1


def test_no_browser_is_no_error(
    ran: tuple[Path, list[Completion]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(url: str) -> bool:
        raise webbrowser.Error("could not locate runnable browser")

    monkeypatch.setattr(webbrowser, "open", fail)
    done = runner.invoke(app, ["show", str(ran[0]), "--output", str(tmp_path / "page.html")])
    assert done.exit_code == 0 and (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request", "1"], "--request needs --terminal"),
        (["--terminal", "--request", "3"], "no request 3: the trace has 3, numbered from 0"),
        (["--terminal", "--request", "-1"], "no request -1"),
        (["--output", "SAME"], "would overwrite the trace"),
        (["--output", "no/such/folder/page.html"], "cannot write the page"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], message: str, ran: tuple[Path, list[Completion]]) -> None:
    path = str(ran[0])
    done = runner.invoke(app, ["show", path, "--no-open", *(path if a == "SAME" else a for a in arguments)])
    assert done.exit_code in (1, 2)
    assert message in done.stderr.replace("\n", " ") and "Traceback" not in done.output + done.stderr


def test_the_terminal_shows_the_answer_and_the_counts(ran: tuple[Path, list[Completion]]) -> None:
    trace, stats = read(ran[0]), ran[1][0].stats
    done = runner.invoke(app, ["show", str(ran[0]), "--terminal", "--request", "0"], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    assert "request 0" in done.stdout and "request 1" not in done.stdout
    assert f"recycling · {stats.accepted} of {stats.drafted} accepted" in done.stdout
    assert f"{stats.passes} passes" in done.stdout and f"{stats.matched[0]} of {stats.offered[0]}" in done.stdout
    data = page.describe(trace)
    answer = terminal.answer(data["requests"][0])
    assert answer.plain == terminal.plain(text_of(trace, 0))
    assert {"green", "underline"} <= {word for span in answer.spans for word in str(span.style).split()}
    everything = runner.invoke(app, ["show", str(ran[0]), "--terminal"]).stdout
    assert all(f"request {i}" in everything for i in range(3))


def test_text_cannot_command_the_terminal(tmp_path: Path) -> None:
    console = Console(record=True, width=100, file=Path(os.devnull).open("w"))  # noqa: SIM115
    console.print(terminal.render(page.describe(read(hostile(tmp_path / "trace.jsonl")))))
    console.file.close()
    shown = console.export_text()
    assert r"\x1b[31mred\x07" in shown and "\x1b" not in shown and "\x07" not in shown


def test_a_long_table_says_how_long(tmp_path: Path) -> None:
    lines = Lines({0: "a"})
    for _ in range(100):
        lines.add([0], [-1], [0], [0])
    path = lines.write(tmp_path / "trace.jsonl")
    shown = runner.invoke(app, ["show", str(path), "--terminal"]).stdout
    assert "the first 40 of 100 passes" in shown


def test_a_trace_without_requests_and_a_request_without_passes(tmp_path: Path) -> None:
    lines = Lines({0: "a"})
    path = lines.write(tmp_path / "trace.jsonl")
    assert BROKEN_END in runner.invoke(app, ["show", str(path), "--terminal"]).stdout
    lines.lines.pop()
    lines.write(path)
    assert "no requests" in runner.invoke(app, ["show", str(path), "--terminal"]).stdout


# In a browser.


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A page that fails the test when a script fails or when anything but a local file is asked for."""
    found = browser.new_page(viewport={"width": 1280, "height": 1000})
    wrong: list[str] = []
    found.on("console", lambda message: wrong.append(message.text))
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("request", lambda request: None if request.url.startswith("file:") else wrong.append(request.url))
    yield found
    found.close()
    assert wrong == []


def opened(tab: Any, path: Path) -> Trace:
    trace = read(path)
    target = path.with_suffix(".html")
    page.write(trace, target)
    tab.goto(target.as_uri())
    return trace


def bar(tab: Any, number: int) -> tuple[float, float]:
    """Where the bar of a pass is."""
    mark, svg = tab.locator("#mark").bounding_box(), tab.locator("#plot svg").bounding_box()
    return svg["x"] + (number + 0.5) * mark["width"], svg["y"] + svg["height"] / 2


def test_the_page_shows_every_request(tab: Any, ran: tuple[Path, list[Completion]]) -> None:
    opened(tab, ran[0])
    assert tab.inner_text("#model") == "toy" and tab.inner_text("#lossless") == "lossless"
    assert tab.locator("#request option").count() == 3
    for number, done in enumerate(ran[1]):
        tab.select_option("#request", str(number))
        assert tab.text_content("#answer") == done.text
        assert tab.locator(".token").count() == done.stats.tokens
        assert tab.locator(".token.s0, .token.s1").count() == done.stats.accepted
        assert f"{done.stats.accepted} of {done.stats.drafted} accepted" in tab.inner_text("#legend")
        assert f"own choice · {done.stats.tokens - done.stats.accepted}" in tab.inner_text("#legend")
        assert f"{done.stats.matched[0]} of {done.stats.offered[0]}" in tab.inner_text("#depths")
    assert not tab.locator("#prompt pre").is_visible()
    tab.click("#prompt summary")
    assert tab.inner_text("#prompt pre") == "xyxyxyxy"


def test_a_token_shows_its_pass(tab: Any, ran: tuple[Path, list[Completion]]) -> None:
    trace = opened(tab, ran[0])
    passes = trace.requests[0].passes
    number, record = next((i, p) for i, p in enumerate(passes) if len(p.path) > 1 and len(p.tokens) > len(p.path) + 1)
    tab.locator(".pass").nth(number).locator(".token").first.hover()
    assert tab.inner_text("#pass-name") == f"Pass {number + 1} of {len(passes)}"
    assert tab.locator("#tree tr").count() == len(record.tokens)
    assert tab.locator("#tree tr.accepted").count() == len(record.path) - 1
    wanted = sorted(reason(record, node, trace.pieces) for node in range(len(record.tokens)))
    assert sorted(tab.locator("#tree .why").all_text_contents()) == wanted
    assert "rejected: the target chose" in tab.inner_text("#tree")
    assert f"shared by {record.rows} requests" in tab.inner_text("#pass-facts")
    assert "score" in tab.inner_text("#pass-times")
    judged = record.judged[0]
    assert f"{judged.choice:.3f}" in tab.locator("#tree tr").first.inner_text()
    assert tab.locator("#tree tr.chosen").count() == 1


def test_keys_go_from_token_to_token_and_a_click_pins(tab: Any, ran: tuple[Path, list[Completion]]) -> None:
    passes = opened(tab, ran[0]).requests[0].passes
    for _ in range(10):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.classList.contains('token')"):
            break
    focused = "Number(document.activeElement.dataset.token)"
    assert tab.evaluate(focused) == 0
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowLeft")
    assert tab.evaluate(focused) == 1
    tab.keyboard.press("ArrowDown")
    where = int(tab.evaluate("document.activeElement.dataset.pass"))
    assert tab.inner_text("#pass-name").startswith(f"Pass {where + 1} of")
    tab.keyboard.press("End")
    assert tab.inner_text("#pass-name") == f"Pass {len(passes)} of {len(passes)}"
    tab.locator(".token").first.click()
    tab.locator(".token").last.hover()
    assert tab.inner_text("#pass-name").startswith("Pass 1 of") and tab.get_attribute("#pin", "aria-pressed") == "true"
    tab.keyboard.press("Escape")
    tab.locator(".token").nth(3).hover()
    tab.locator(".token").last.hover()
    assert tab.inner_text("#pass-name").startswith(f"Pass {len(passes)} of")


def test_the_timeline_selects_a_pass(tab: Any, ran: tuple[Path, list[Completion]]) -> None:
    opened(tab, ran[0])
    tab.mouse.move(*bar(tab, 4))
    assert tab.inner_text("#pass-name").startswith("Pass 5 of")
    assert tab.locator(".pass.chosen .token").first.get_attribute("data-pass") == "4"
    tab.locator("#plot svg").focus()
    tab.keyboard.press("ArrowRight")
    assert tab.inner_text("#pass-name").startswith("Pass 6 of")
    tab.click("#before")
    assert tab.inner_text("#pass-name").startswith("Pass 5 of")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_differ_and_follow_the_scheme(scheme: str, tab: Any, ran: tuple[Path, list[Completion]]) -> None:
    tab.emulate_media(color_scheme=scheme)
    opened(tab, ran[0])
    back = "element => getComputedStyle(element).backgroundColor"
    light = sum(int(n) for n in re.findall(r"\d+", tab.evaluate(back, tab.query_selector("body")))[:3]) > 3 * 128
    assert light == (scheme == "light")
    proposed, own = tab.query_selector(".token.s0"), tab.query_selector(".token:not([class*=' s'])")
    assert tab.evaluate(back, proposed) != tab.evaluate(back, own)
    assert tab.evaluate(back, proposed) == tab.evaluate(back, tab.query_selector("#legend .s0"))


def test_hostile_text_is_text(tab: Any, tmp_path: Path) -> None:
    opened(tab, hostile(tmp_path / "trace.jsonl"))
    assert tab.text_content("#answer") == HOSTILE + "\x1b[31mred\x07"
    assert HOSTILE in tab.text_content("#legend") and HOSTILE in tab.text_content("#about")
    tab.locator(".token").first.hover()
    assert HOSTILE in tab.text_content("#tree") and HOSTILE in tab.text_content("#prompt")
    assert tab.locator("img, b").count() == 0
    assert tab.title() == "by hand – Outpace trace"


def test_empty_traces_open(tab: Any, tmp_path: Path) -> None:
    lines = Lines({0: "a"})
    opened(tab, lines.write(tmp_path / "trace.jsonl"))
    assert tab.inner_text("#pass-name") == "No pass" and BROKEN_END in tab.inner_text("#settings")
    lines.lines.pop()
    opened(tab, lines.write(tmp_path / "trace.jsonl"))
    assert tab.locator("#none").is_visible() and not tab.locator("#shown").is_visible()


def test_two_thousand_passes_open(tab: Any, tmp_path: Path) -> None:
    lines = Lines({token: f" word{token}" for token in range(60)})
    parents = [-1, *(node // 2 for node in range(48))]
    for _ in range(2000):
        lines.add(list(range(49)), parents, [0, 1, 3], [1, 3, 59])
    opened(tab, lines.write(tmp_path / "trace.jsonl"))
    assert tab.locator(".token").count() == 6000
    tab.locator("#plot svg").focus()
    for _ in range(20):
        tab.keyboard.press("ArrowRight")
    assert tab.inner_text("#pass-name") == "Pass 21 of 2000"
    assert tab.locator("#tree tr").count() == 49
