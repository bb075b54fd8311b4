"""What a server tells of its work: figures of passes, lines of its log, spans of OpenTelemetry, the dashboard."""

from __future__ import annotations

import gzip
import json
import logging
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outpace.api.model import Model
from outpace.cli import app
from outpace.core.engine import Engine
from outpace.serve.telemetry.log_lines import JSONFormatter
from outpace.serve.telemetry.passes import PassMetrics
from outpace.testing import ToyLM
from tests.serving import NAME, Live, live, until
from tests.tiny_tokenizers import random_model

ROOT = Path(__file__).parent.parent
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
LABELS = f'{{engine="0",model_name="{NAME}"}}'
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model("tiktoken")


def values(server: Live) -> dict[str, float]:
    lines = [line for line in server.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


# Passes


def test_passes_are_counted_as_they_run(model: Model) -> None:
    with live(model) as server:
        for stream in (False, True):
            server.post(CHAT, {**HELLO, "max_tokens": 9, "stream": stream, "speculation": "off", "temperature": 0})
        found = values(server)
    prompt = found[f"vllm:prompt_tokens_total{LABELS}"] - found[f"vllm:prompt_tokens_cached_total{LABELS}"]
    for name in ("outpace:", "vllm:"):
        assert found[f"{name}generation_tokens_total{LABELS}"] == 18
        assert found[f"{name}iteration_tokens_total_count{LABELS}"] == 18
        assert found[f"{name}iteration_tokens_total_sum{LABELS}"] == 18 + prompt
        assert found[f"{name}inter_token_latency_seconds_count{LABELS}"] == 16
        assert found[f"{name}num_preemptions_total{LABELS}"] == 0
    buckets = [found[name] for name in found if name.startswith("vllm:inter_token_latency_seconds_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] == 16 and server.service.model.engine.on_pass == []


def test_a_request_that_gives_up_its_slot_is_counted(model: Model) -> None:
    lm = ToyLM()
    engine = Engine(lm, 2)
    toy = Model(lm)
    toy.engine = engine
    seqs = [toy.sequence(request) for request in toy._requests([[1, 2, 3], [4, 5, 6]], {"method": "plain"})[0]]
    for seq in seqs:
        engine.submit(seq)
    engine.step()
    passes = PassMetrics(engine, {"engine": "0"})
    assert engine.scheduler.make_room(seqs[1], MemoryError("full")) and not seqs[1].finished
    (preemptions,) = [family for family in passes.collect() if family.name.endswith("num_preemptions")]
    assert preemptions.samples[0].value == 1


# The log


def test_the_log_tells_of_start_requests_refusals_and_end(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "outpace.serve"), live(model, keys={"ann": "key-a"}) as server:
        ann = {"Authorization": "Bearer key-a"}
        good = server.post(CHAT, HELLO, headers=ann)
        refused = server.post(CHAT, HELLO), server.post(CHAT, {**HELLO, "colour": "secret"}, headers=ann)
        late = server.post(CHAT, {**HELLO, "n": 99}, headers=ann)
        server.post("/v1/" + "x" * 500, {}, headers=ann)
    records = [record.getMessage() for record in caplog.records if record.name == "outpace.serve"]
    lines = [json.loads(text) for text in records]
    events = [line["event"] for line in lines]
    assert events == ["starting", "ready", "request", *["refused"] * 2, "request", "refused", "draining", "stopped"]
    assert all(line["time"] > 1e9 for line in lines)
    assert lines[0]["method"] == "auto" and lines[1]["seconds"] >= 0
    assert lines[2]["id"] == good.headers["x-request-id"] and lines[2]["owner"] == "ann"
    for line, reply, code in zip(lines[3:5], refused, ("invalid_api_key", "unknown_field"), strict=True):
        assert (line["id"], line["status"]) == (reply.headers["x-request-id"], reply.status_code)
        assert (line["code"], line["path"]) == (code, CHAT)
    assert lines[5]["id"] == late.headers["x-request-id"] and lines[5]["code"] == "invalid_value"
    assert len(lines[6]["path"]) == 200 and "secret" not in str(records) and "key-a" not in str(records)


def test_lines_of_others_are_json_too() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, "it %s", ("broke",), sys.exc_info())
    said = json.loads(JSONFormatter().format(record))
    assert (said["event"], said["logger"], said["message"]) == ("error", "uvicorn.error", "it broke")
    assert "ValueError: why" in said["traceback"]


# Spans


def attributes(span: Any) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.fixture
def traced(model: Model, request: pytest.FixtureRequest) -> Iterator[tuple[Live, Any]]:
    """A server whose spans are kept in memory, and go to a collector that is not there."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace.export", reason="outpace[otel] is not installed")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    shown = getattr(request, "param", False)
    with collector() as url, live(model, otlp_endpoint=url, log_prompts=shown) as server:
        spans = server.service.log.spans
        assert spans is not None
        spans.provider.add_span_processor(sdk.SimpleSpanProcessor(memory))
        yield server, memory.get_finished_spans


def test_a_span_has_the_figures_of_its_request(traced: tuple[Live, Any]) -> None:
    server, spans = traced
    asked = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": ["xyz"], "n": 2, "max_tokens": 12, "ignore_eos": True}
    wish = {"speculation": {"method": "recycling", "options": {"price": 0}}}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    reply = server.post(CHAT, {**HELLO, **asked, **wish}, headers=headers).json()
    (span,) = spans()
    found = attributes(span)
    assert (span.name, span.kind.name, span.status.status_code.name) == (f"chat {NAME}", "SERVER", "UNSET")
    assert (f"{span.context.trace_id:x}", f"{span.parent.span_id:x}") == (TRACE.lstrip("0"), PARENT)
    for name in ("temperature", "top_p", "seed", "max_tokens"):
        assert found[f"gen_ai.request.{name}"] == asked[name]
    assert found["gen_ai.request.stop_sequences"] == ("xyz",) and found["gen_ai.request.choice.count"] == 2
    assert found["gen_ai.response.id"] == reply["id"] and found["http.response.status_code"] == 200
    assert found["gen_ai.response.finish_reasons"] == ("length", "length")
    assert found["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == reply["usage"]["completion_tokens"] == 24
    steps = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    seconds = (span.end_time - span.start_time) / 1e9
    assert 0 < sum(found[f"gen_ai.latency.{name}"] for name in steps) <= seconds
    assert found["outpace.methods"] == ("recycling",) and found["outpace.passes"] <= 24
    assert found["outpace.speculation.num_draft_tokens"] > 0
    assert "Hello" not in str(found)


def test_spans_of_streams_failures_and_text_completions(traced: tuple[Live, Any]) -> None:
    server, spans = traced
    server.post(CHAT, {**HELLO, "stream": True})
    server.post(COMPLETIONS, {"prompt": "One", "max_tokens": 2})
    server.post(CHAT, {**HELLO, "n": 99}, headers={"traceparent": "nonsense"})
    server.post(CHAT, {**HELLO, "model": "other"})
    streamed, text, *failed = spans()
    assert attributes(streamed)["gen_ai.request.stream"] is True
    assert text.name == f"text_completion {NAME}" and attributes(text)["gen_ai.usage.output_tokens"] == 2
    for span, status, code in zip(failed, (400, 404), ("invalid_value", "model_not_found"), strict=True):
        found = attributes(span)
        assert (found["http.response.status_code"], found["error.type"]) == (status, code)
        assert span.parent is None and span.status.status_code.name == "ERROR"


@pytest.mark.parametrize("traced", [True], indirect=True)
def test_spans_have_texts_only_when_asked(traced: tuple[Live, Any]) -> None:
    server, spans = traced
    text = server.post(CHAT, HELLO).json()["choices"][0]["message"]["content"]
    found = attributes(spans()[0])
    (given,), (said,) = (json.loads(found[f"gen_ai.{kind}.messages"]) for kind in ("input", "output"))
    assert given["role"] == "user" and "Hello" in given["parts"][0]["content"]
    assert said["parts"] == [{"type": "text", "content": text}] and said["finish_reason"] == "length"


RECEIVED: list[Any] = []


class Collector(BaseHTTPRequestHandler):
    """Takes spans as OpenTelemetry's own collector does."""

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        data = self.rfile.read(int(self.headers["Content-Length"]))
        data = gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data
        RECEIVED.append((self.path, ExportTraceServiceRequest.FromString(data)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *given: Any) -> None:
        """Write nothing."""


@contextmanager
def collector() -> Iterator[str]:
    """The address of a collector that fills RECEIVED."""
    RECEIVED.clear()
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_collector_gets_the_spans_at_the_latest_when_the_server_stops(model: Model) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="outpace[otel] is not installed")
    with collector() as url:
        with live(model, otlp_endpoint=url) as server:
            id = server.post(CHAT, HELLO).json()["id"]
        until(lambda: RECEIVED)
    ((path, sent),) = RECEIVED
    (resource,) = sent.resource_spans
    about = {each.key: each.value.string_value for each in resource.resource.attributes}
    (span,) = resource.scope_spans[0].spans
    found = {each.key: each.value for each in span.attributes}
    assert path == "/v1/traces" and about["service.name"] == "outpace"
    assert found["gen_ai.response.id"].string_value == id


def test_a_missing_package_or_a_wrong_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = CliRunner().invoke
    wrong = run(app, ["serve", "--otlp-endpoint", "localhost:4318"])
    assert wrong.exit_code != 0 and "is no URL, such as http://localhost:4318" in " ".join(wrong.output.split())
    monkeypatch.setattr("outpace.cli.serving.serve.find_spec", lambda name: None if "opentelemetry" in name else name)
    missing = run(app, ["serve", "--otlp-endpoint", "http://localhost:4318"])
    assert missing.exit_code != 0 and "pip install 'outpace[otel]'" in " ".join(missing.output.split())


# The dashboard


def test_the_dashboard_asks_for_what_there_is(model: Model, tmp_path: Path) -> None:
    board = json.loads((ROOT / "deploy/grafana.json").read_text())
    panels = board["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    with live(model) as server:
        server.post(CHAT, {**HELLO, "speculation": {"method": "recycling", "options": {"price": 0}}})
        there = {name.partition("{")[0] for name in values(server)}
    names = {name for query in asked for name in re.findall(r"outpace:\w+", query)}
    assert names <= there, names - there
    assert len({panel["id"] for panel in panels}) == len(panels) and len(asked) > 20
    variables = {each["name"] for each in board["templating"]["list"]}
    assert set(re.findall(r"\$(\w+)", " ".join(asked))) - variables == {"__rate_interval"}
    if shutil.which("promtool") is None:
        pytest.skip("promtool, which reads the queries, is not installed")
    rules = [{"record": f"q{i}", "expr": query.replace("$__rate_interval", "1m")} for i, query in enumerate(asked)]
    file = tmp_path / "rules.json"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
