"""The playground: how it is served, and the page in a real browser against a real server."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outpace.api.model import Model
from outpace.serve.launch import server_of
from outpace.serve.playground.pages import FILES
from outpace.serve.settings import ServeSettings
from outpace.text import first_difference
from outpace.tracing.trace import Trace, read
from outpace.tracing.viewer import page as viewer
from tests.serving import PATIENCE, THINKING, TURNS, Live, live, scripted, until

REPLY = "the quick brown fox, the quick red fox, the slow brown dog, the quick brown dog and the slow red fox. "
HOSTILE = "<img src=x onerror=\"document.title='owned'\"></script><b>&lt;"
AXE = os.environ.get("OUTPACE_AXE", "")
NAME = "page"


def script(prompt: str) -> str:
    asked = prompt.rpartition("<|im_start|>user\n")[2]
    if "slowly" in asked:
        time.sleep(0.01)
    return HOSTILE if "hostile" in asked else REPLY


@pytest.fixture(scope="module")
def model() -> Model:
    return scripted(TURNS, script)


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[Live]:
    with live(model, names=(NAME,)) as found:
        yield found


@pytest.fixture(scope="module")
def locked(model: Model) -> Iterator[Live]:
    with live(model, keys={"ann": "key-a"}) as found:
        yield found


# How it is served.


def test_the_page_needs_no_key_and_asks_nobody_else(locked: Live) -> None:
    for path in FILES:
        reply = locked.get(path)
        assert reply.status_code == 200 and reply.headers["x-content-type-options"] == "nosniff"
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert not re.search(r"https?://|@import|innerHTML|outerHTML|insertAdjacentHTML|document\.write", reply.text), (
            path
        )
    text = locked.get("/").text
    assert "<style" not in text and " style=" not in text and " on" not in re.sub(r">[^<]*<", "><", text)
    assert all(body == "" for body in re.findall(r"<script[^>]*>(.*?)</script>", text, flags=re.DOTALL))
    assert locked.get("/playground/settings").status_code == 401
    assert locked.get("/playground/pages.py").status_code == 401
    assert locked.get("/", headers={"Host": "evil.example"}).status_code == 403


def test_it_can_be_switched_off(model: Model, server: Live) -> None:
    with live(model, playground=False) as found:
        assert {found.get(path).status_code for path in (*FILES, "/playground/settings")} == {404}
    assert server.get("/playground/none.js").status_code == 404
    assert not [path for path in server.get("/openapi.json").json()["paths"] if path in FILES or "playground" in path]


def test_who_starts_a_server_hears_its_port(model: Model) -> None:
    server, ports = server_of(model, ServeSettings((NAME,), NAME, port=0)), list[int]()
    server.on_start = ports.append
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: ports and server.service.state == "ready")
    server.should_exit = True
    thread.join(PATIENCE)
    assert ports[0] > 0


def test_the_page_offers_what_requests_may_choose(server: Live) -> None:
    offered = server.get("/playground/settings").json()
    for name, method in offered["methods"].items():
        for side in ("least", "most"):
            options = {o["name"]: o[side] for o in method["options"] if o[side] is not None}
            speculation = {"method": name, "options": options}
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "speculation": speculation}
            if "store_tokens" not in options:  # such a store takes a while to make
                assert server.post("/v1/chat/completions", chat).status_code == 200, speculation
    assert offered["method"] == "auto" and offered["traces"] and offered["sampling"]["temperature"] == 1.0


# In a browser.


@pytest.fixture
def tab(browser: Any, server: Live) -> Iterator[Any]:
    """A page that fails the test when a script fails or when anything but its server is asked for."""
    found = browser.new_page(viewport={"width": 1280, "height": 900})
    found.set_default_timeout(1000 * PATIENCE)
    wrong: list[str] = []
    found.on("console", lambda message: wrong.append(message.text))
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on(
        "request",
        lambda asked: None if asked.url.startswith((server.url, "data:", "blob:")) else wrong.append(asked.url),
    )
    opened(found, server)
    yield found
    found.close()
    assert wrong == []


def opened(tab: Any, server: Live) -> None:
    tab.goto(server.url)
    tab.wait_for_selector("#status:not(:has-text('Connecting …'))")
    tab.evaluate("document.querySelector('#temperature').value = 0")


def wait_for_status(tab: Any, text: str) -> None:
    tab.wait_for_selector(f"#status:has-text('{text}')")  # a script of the test could not wait: the page allows no eval


def say(tab: Any, text: str, method: str = "") -> None:
    """Send a message, and wait for the end of its answer."""
    if method:
        tab.select_option("#method", method)
    tab.fill("#message", text)
    tab.press("#message", "Enter")
    tab.wait_for_selector("#stop-answer:disabled")


def saved(tab: Any, kind: str, folder: Path) -> Path:
    with tab.expect_download() as caught:
        tab.click(f"#save-{kind}")
    path = folder / caught.value.suggested_filename
    caught.value.save_as(path)
    return path


def traced(tab: Any, folder: Path) -> Trace:
    """The server's trace of all answers."""
    return read(saved(tab, "trace", folder))


def test_an_answer_has_the_colours_of_its_trace(tab: Any, tmp_path: Path) -> None:
    say(tab, "Hello", "ngram")
    say(tab, "Once more", "recycling")
    data = viewer.describe(traced(tab, tmp_path))
    assert data["sources"] == ["ngram", "recycling"]
    for request, column in zip(data["requests"], tab.locator(".column").all(), strict=True):
        assert column.locator(".answer").text_content() == REPLY
        sources = [source for drawn in request["passes"] for source in drawn["sources"]]
        shown = column.locator(".token").evaluate_all(
            "all => all.map(e => [e.className, e.getAttribute('aria-label')])"
        )
        assert len(shown) == len(sources) == request["stats"]["tokens"]
        for (kind, label), source in zip(shown, sources, strict=True):
            assert re.findall(r"\bs\d\b", kind) == ([] if source < 0 else [f"s{source}"])
            assert ("the target's own choice" if source < 0 else data["sources"][source]) in label
        (used,) = request["proposers"]
        assert used["accepted"] and f"{used['accepted']} of {used['drafted']} accepted" in column.inner_text()
        assert f"own choice · {request['own']}" in column.inner_text()
        assert f"{request['stats']['tokens_per_pass']:.2f} tokens per pass" in column.inner_text()


def test_the_page_draws_what_the_viewer_draws(tab: Any, tmp_path: Path) -> None:
    tab.select_option("#method", "recycling")
    tab.click("#more summary")
    tab.check("#probs")
    tab.fill("[data-option=price]", "0")
    say(tab, "Hello")
    path = saved(tab, "trace", tmp_path)
    wanted = viewer.describe(read(path))
    found = tab.evaluate(
        """async (lines) => {
          const { AnswerTrace, Words } = await import("/playground/trace.js");
          const trace = new AnswerTrace(new Words(["prefill", "draft", "score", "verify", "keep"]));
          return { passes: trace.take(lines), words: trace.words };
        }""",
        [json.loads(line) for line in path.read_text().splitlines()],
    )
    assert found["words"]["sources"] == wanted["sources"] and found["words"]["reasons"] == wanted["reasons"]
    drawn = json.loads(json.dumps(wanted["requests"][0]["passes"]))
    for ours, theirs in zip(found["passes"], drawn, strict=True):
        for probs in ("draft", "target", "choices"):
            assert ours.pop(probs) == pytest.approx(theirs.pop(probs), rel=1e-5), probs
        assert ours == theirs
    assert any("rejected: the target chose" in why and "against" in why for why in wanted["reasons"])


def test_the_tree_of_a_pass_on_hover_and_focus(tab: Any, tmp_path: Path) -> None:
    say(tab, "Hello", "recycling")
    passes = traced(tab, tmp_path).requests[0].passes
    number, record = next((i, p) for i, p in enumerate(passes) if len(p.path) > 1 and len(p.tokens) > len(p.path))
    assert tab.inner_text("#pass-name") == "No pass"
    tab.locator(".pass").nth(number).locator(".token").first.hover()
    assert tab.inner_text("#pass-name") == f"Pass {number + 1} of {len(passes)}"
    assert tab.locator("#tree tr").count() == len(record.tokens)
    assert tab.locator("#tree tr.accepted").count() == len(record.path) - 1
    assert tab.locator("#tree tr.chosen").count() == 1 and "score" in tab.inner_text("#pass-times")
    tab.locator(".token").last.click()
    tab.locator(".token").first.hover()
    assert tab.inner_text("#pass-name").startswith(f"Pass {len(passes)} of"), "a click pins"
    tab.locator(".token").first.focus()
    assert tab.inner_text("#pass-name").startswith("Pass 1 of")
    tab.click("#after")
    assert tab.inner_text("#pass-name").startswith("Pass 2 of")


def test_speculation_on_and_off_side_by_side(tab: Any) -> None:
    tab.check("#compare")
    tab.click("#more summary")
    tab.fill("#temperature", "0.8")
    tab.fill("#seed", "11")
    say(tab, "Hello", "suffix")
    assert "Equal: both texts are the same" in tab.inner_text("#status")
    first, second = tab.locator(".column").all()
    assert first.locator(".answer").text_content() == second.locator(".answer").text_content()
    assert second.locator(".token[class*=' s']").count() == 0 and "1.00 tokens per pass" in second.inner_text()
    for column in (first, second):
        assert re.search(r"[\d.]+ tokens/s", column.locator(".rate").inner_text())
    assert "seed 11" in tab.inner_text("#log")


def test_where_texts_part(tab: Any) -> None:
    def another_seed(route: Any) -> None:
        body = route.request.post_data_json
        if body.get("speculation") == "off":
            body["temperature"], body["seed"] = 3.0, 1
        route.continue_(post_data=json.dumps(body))

    tab.route("**/v1/chat/completions", another_seed)
    tab.check("#compare")
    say(tab, "Hello")
    texts = [answer.text_content() for answer in tab.locator(".answer").all()]
    at = first_difference(*texts)
    assert at is not None and f"The texts part at character {at + 1}:" in tab.inner_text("#status")
    assert tab.locator(".token.parting").count() == 2


def test_stop_keeps_what_has_come(tab: Any, server: Live) -> None:
    tab.fill("#message", "Say it slowly")
    tab.press("#message", "Enter")
    tab.wait_for_selector(".token >> nth=3")
    assert tab.is_enabled("#stop-answer") and tab.is_disabled("#send")
    assert re.search(r"[\d.]+ tokens/s", tab.inner_text(".rate"))
    tab.click("#stop-answer")
    wait_for_status(tab, "Ended: stopped.")
    until(lambda: server.idle)
    part = tab.text_content(".answer")
    assert part and REPLY.startswith(part) and part != REPLY
    with tab.expect_request("**/v1/chat/completions") as asked:
        say(tab, "Go on")
    said = [message["content"] for message in asked.value.post_data_json["messages"]]
    assert said == ["Say it slowly", part, "Go on"]


def test_every_control_is_in_the_request(tab: Any) -> None:
    tab.click("#more summary")
    numbers = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 5, "max_tokens": 6}
    for name, value in numbers.items():
        tab.fill(f"#{name}", str(value))
    tab.fill("#system", "Be brief.")
    tab.fill("#prediction", "the quick")
    tab.fill("#stop", "END\n\nSTOP")
    tab.check("#probs")
    tab.select_option("#method", "ngram")
    tab.fill("[data-option=depth]", "3")
    with tab.expect_request("**/v1/chat/completions") as asked:
        say(tab, "Hello")
    assert asked.value.post_data_json == {
        **numbers,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "stop": ["END", "STOP"],
        "prediction": {"type": "content", "content": "the quick"},
        "speculation": {"method": "ngram", "options": {"depth": 3}},
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_trace": "probs",
    }
    assert "temperature, top_p" in tab.inner_text("#chosen") and "Done" in tab.inner_text("#status")
    tab.fill("#top_p", "2")
    tab.fill("#message", "Hello")
    tab.press("#message", "Enter")
    assert tab.locator(".exchange").count() == 1 and tab.input_value("#message") == "Hello"


def test_a_stop_string_cuts_the_tokens_too(tab: Any) -> None:
    tab.click("#more summary")
    tab.fill("#stop", "red")
    say(tab, "Hello", "plain")
    assert tab.text_content(".answer") == REPLY[: REPLY.index("red")]


def test_a_conversation_is_saved_and_cleared(tab: Any, tmp_path: Path) -> None:
    tab.click("#save-json")
    assert tab.inner_text("#status") == "There is nothing to save yet."
    tab.check("#compare")
    say(tab, "Hello", "ngram")
    found = json.loads(saved(tab, "json", tmp_path).read_text())
    assert found["model"] == NAME and [m["content"] for m in found["messages"]] == ["Hello", REPLY]
    answers = found["turns"][0]["answers"]
    assert [answer["content"] for answer in answers] == [REPLY, REPLY]
    assert answers[0]["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert found["turns"][0]["request"]["seed"] >= 0 and found["turns"][0]["verdict"].startswith("Equal")
    text = saved(tab, "markdown", tmp_path).read_text()
    assert text.startswith(f"# Conversation with {NAME}") and text.count(REPLY) == 2 and "## User\n\nHello" in text
    assert [request.method for request in traced(tab, tmp_path).requests] == ["ngram", "plain"]
    tab.click("#clear")
    assert tab.locator(".exchange").count() == 0 and tab.locator("#empty").is_visible()


def test_everything_can_be_done_with_the_keyboard(tab: Any) -> None:
    focused = "document.activeElement.id || document.activeElement.className"
    assert tab.evaluate(focused) == "message"
    tab.keyboard.type("Hello")
    tab.keyboard.press("Shift+Enter")
    tab.keyboard.type("there")
    tab.keyboard.press("Enter")
    wait_for_status(tab, "Done")
    assert tab.inner_text(".said") == "Hello\nthere"
    tab.keyboard.press("Shift+Tab")
    place = "Number(document.activeElement.dataset.token)"
    assert tab.evaluate(place) == 0 and tab.inner_text("#pass-name").startswith("Pass 1 of")
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate(place) == 1 and tab.get_attribute(":focus", "aria-selected") == "true"
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("End")
    assert tab.evaluate(place) == tab.locator(".token").count() - 1
    tab.keyboard.press("Enter")
    assert tab.get_attribute("#pin", "aria-pressed") == "true"
    tab.keyboard.press("Escape")
    assert tab.get_attribute("#pin", "aria-pressed") == "false"
    tab.keyboard.press("Escape")
    assert tab.inner_text("#pass-name") == "No pass"
    seen = []
    tab.focus("#method")
    while len(seen) < 20 and (not seen or seen[-1] != "save-trace"):
        tab.keyboard.press("Tab")
        seen.append(tab.evaluate(focused))
    wanted = ["compare", "", "log", "message", "send", "clear", "save-json", "save-markdown", "save-trace"]
    assert [name for name in seen if not name.startswith("token")] == wanted, "the summary has no id"
    tab.focus("#message")
    tab.keyboard.type("Say it slowly")
    tab.keyboard.press("Enter")
    tab.wait_for_selector(".column >> nth=1")
    tab.keyboard.press("Escape")
    wait_for_status(tab, "Ended: stopped.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_scheme_and_can_be_heard(scheme: str, tab: Any) -> None:
    tab.emulate_media(color_scheme=scheme)
    tab.click("#more summary")
    say(tab, "Hello", "recycling")
    tab.locator(".token").nth(5).hover()
    back = "element => getComputedStyle(element).backgroundColor"
    light = sum(int(n) for n in re.findall(r"\d+", tab.evaluate(back, tab.query_selector("body")))[:3]) > 3 * 128
    assert light == (scheme == "light")
    drafted, own = tab.query_selector(".token.s0"), tab.query_selector(".token:not([class*=' s'])")
    line = "element => getComputedStyle(element).textDecorationLine"
    assert tab.evaluate(back, drafted) != tab.evaluate(back, own)
    assert (tab.evaluate(line, drafted), tab.evaluate(line, own)) == ("underline", "none"), "not by colour alone"
    for role, name in (
        ("textbox", "Message"), ("button", "Send"), ("button", "Stop"), ("combobox", "Method"), ("spinbutton", "seed"),
        ("listbox", "Tokens of answer 1, speculation: recycling"), ("region", "Messages"), ("group", "Sampling"),
    ):  # fmt: skip
        assert tab.get_by_role(role, name=name).count() == 1, (role, name)
    assert tab.get_by_role("status").inner_text().startswith("Done")
    assert tab.locator("[aria-live=polite].unseen").text_content() == REPLY
    if AXE:
        tab.evaluate(Path(AXE).read_text())
        found = tab.evaluate("axe.run().then(found => found.violations)")
        assert [(v["id"], [n["html"] for n in v["nodes"]]) for v in found] == []


def test_a_narrow_page_scrolls_one_way(tab: Any) -> None:
    tab.set_viewport_size({"width": 360, "height": 740})
    tab.check("#compare")
    say(tab, "Hello " + "w" * 80, "recycling")
    tab.locator(".token").first.click()
    assert tab.locator("#tree").is_visible()
    tab.click("#more summary")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    tab.get_by_role("button", name="close").click()
    assert not tab.locator("#pass-box").is_visible()
    tab.click("#send", trial=True)


def test_hostile_text_is_text(tab: Any) -> None:
    say(tab, f"hostile {HOSTILE}")
    assert tab.inner_text(".said") == f"hostile {HOSTILE}" and tab.text_content(".answer") == HOSTILE
    tab.locator(".token").first.click()
    assert tab.locator("img, b").count() == 0 and tab.title() == f"{NAME} – Outpace playground"


def test_reasoning_is_shown_with_its_marks_and_is_no_part_of_the_conversation(browser: Any) -> None:
    with live(scripted(TURNS + THINKING, lambda prompt: "A riddle?\n</think>\nThe sea.")) as server:
        tab = browser.new_page()
        opened(tab, server)
        tab.check("#compare")
        say(tab, "Hello")
        assert "Equal" in tab.inner_text("#status")
        assert tab.text_content(".answer >> nth=0").endswith("A riddle?\n</think>\nThe sea.")
        with tab.expect_request("**/v1/chat/completions") as asked:
            say(tab, "And?")
        assert [m["content"] for m in asked.value.post_data_json["messages"]] == ["Hello", "The sea.", "And?"]
        tab.close()


def test_a_key_stays_in_the_tab(browser: Any, locked: Live) -> None:
    tab = browser.new_page()
    opened(tab, locked)
    assert "asks for an API key" in tab.inner_text("#status") and tab.evaluate("document.activeElement.id") == "key"
    for key, answer in (("wrong", "the API key is wrong"), ("key-a", "Ready.")):
        tab.fill("#key", key)
        tab.press("#key", "Tab")
        wait_for_status(tab, answer)
    say(tab, "Hello")
    assert tab.text_content(".answer") == REPLY
    assert tab.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie]") == [["key-a"], 0, ""]
    tab.close()


def test_without_traces_the_page_still_chats_and_errors_are_told(browser: Any, model: Model) -> None:
    with live(model, open_without_keys=True) as server:
        tab = browser.new_page()
        opened(tab, server)
        assert "gives no traces" in tab.inner_text("#status")
        say(tab, "Hello")
        assert tab.text_content(".answer") == REPLY and tab.locator(".token").count() == 0
        say(tab, "long " * 5000)
        assert "Ended: the prompt has" in tab.inner_text("#status") and "at most 4096" in tab.inner_text(".error")
        tab.route("**/v1/chat/completions", lambda route: route.abort())
        say(tab, "Hello")
        assert tab.inner_text("#status") == "Ended: the connection to the server broke off."
        tab.close()
