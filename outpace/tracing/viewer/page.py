"""A trace as data for display, and as one self-contained HTML file."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any, TypedDict

from outpace.core.stats import Stats
from outpace.core.tree import ROOT
from outpace.errors import OutpaceError
from outpace.sampling.settings import Sampling
from outpace.storage.files import write_whole
from outpace.tracing.trace import PassRecord, RequestTrace, Trace, reason

PHASES = ("prefill", "draft", "score", "verify", "keep")
TARGET = -1  # source of a token that no method proposed: the target's own choice
STYLES = ("parts.css", "page.css")
SCRIPTS = ("parts.js", "page.js")


class PassData(TypedDict):
    """One pass. Names and reasons occur often, so `by`, `sources` and `why` are indices into tables of the page."""

    at: float
    rows: int
    tokens: list[int]
    parents: list[int]
    by: list[int]  # source of each node
    why: list[int]  # reason for each node
    path: list[int]
    committed: list[int]
    text: list[str]  # what each committed token added to the answer
    sources: list[int]  # source of each committed token
    accepted: int
    seconds: list[float]  # by phase
    draft: dict[int, float | None]  # node -> the draft's probability
    target: dict[int, float | None]  # node -> the target's probability
    choices: dict[int, float | None]  # node -> the target's probability of what it chose there
    decision: str  # what the policy decided about the draft; may be empty


class Proposer(TypedDict):
    """The draft tokens of one source in a request."""

    source: int
    accepted: int
    drafted: int


class RequestData(TypedDict):
    """One request."""

    id: int
    method: str
    verifier: str
    policy: str
    lossless: bool
    settings: str
    prompt: str
    prompt_tokens: int
    end: str
    error: str | None
    stats: dict[str, Any]
    proposers: list[Proposer]
    own: int  # tokens that no method proposed
    passes: list[PassData]


class PageData(TypedDict):
    """A whole trace."""

    model: str
    versions: str
    methods: str
    verifiers: str
    lossless: bool
    totals: dict[str, Any]
    phases: list[str]
    sources: list[str]
    reasons: list[str]
    pieces: dict[int, str]
    requests: list[RequestData]


class StringTable:
    """Numbers the distinct strings of the page."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


class SharedText:
    """The text that all requests of the page share."""

    def __init__(self, trace: Trace):
        self.known = trace.pieces
        self.pieces = _pieces(trace)
        self.sources = StringTable()
        self.reasons = StringTable()


def describe(trace: Trace) -> PageData:
    """Everything that the page and the terminal show of a trace."""
    try:
        words, stats = SharedText(trace), [_stats(request) for request in trace.requests]
        requests = [_request(request, counted, words) for request, counted in zip(trace.requests, stats, strict=True)]
        versions = trace.header.get("versions", {})
        return PageData(
            model=str(trace.header.get("model") or "unnamed model"),
            versions=", ".join(f"{name} {version}" for name, version in versions.items()),
            methods=_names(request.method for request in trace.requests),
            verifiers=_names(request.verifier for request in trace.requests),
            lossless=all(request.lossless for request in trace.requests),
            totals=_totals(trace, stats),
            phases=list(PHASES),
            sources=list(words.sources.numbers),
            reasons=list(words.reasons.numbers),
            pieces=words.pieces,
            requests=requests,
        )
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise OutpaceError(f"the trace has a record that contradicts its format: {error!r}") from error


def html(data: PageData) -> str:
    """The HTML page. Text of the trace is data in it, never markup: "<" cannot occur in that data."""
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise OutpaceError(f"the trace has a number that JSON cannot represent: {error}") from error
    page = asset("page.html")
    # The data goes in last: it may spell the name of a place.
    for place, files in (("__STYLE__", STYLES), ("__SCRIPT__", SCRIPTS)):
        page = page.replace(place, "".join(map(asset, files)))
    return page.replace("__DATA__", text.replace("<", "\\u003c"), 1)


def asset(name: str) -> str:
    """Return a file of which the page is made; the server's playground has some of them too."""
    return resources.files("outpace.tracing.viewer").joinpath(name).read_text(encoding="utf-8")


def write(trace: Trace, path: Path) -> None:
    """Write the page, either whole or not at all."""
    text = html(describe(trace))
    try:
        write_whole(path, text)
    except OSError as error:
        raise OutpaceError(f"cannot write the page: {error}") from error


def _request(request: RequestTrace, stats: Stats, words: SharedText) -> RequestData:
    passes = [_pass(record, words) for record in request.passes]
    drafted = Counter(source for p in passes for source in p["by"][1:])
    accepted = Counter(source for p in passes for source in p["sources"])
    return RequestData(
        id=request.id,
        method=request.method,
        verifier=request.verifier,
        policy=request.policy,
        lossless=request.lossless,
        settings=_settings(request.sampling),
        prompt="".join(words.pieces[token] for token in request.prompt),
        prompt_tokens=len(request.prompt),
        end=request.finish_reason or "the trace breaks off",
        error=request.error,
        stats=stats.to_dict(),
        proposers=[Proposer(source=s, accepted=accepted[s], drafted=n) for s, n in sorted(drafted.items())],
        own=accepted[TARGET],
        passes=passes,
    )


def _pass(record: PassRecord, words: SharedText) -> PassData:
    nodes, accepted = range(len(record.tokens)), record.step.accepted
    by = [TARGET if node == ROOT else words.sources.number(record.by[node]) for node in nodes]
    own = len(record.committed) - accepted
    return PassData(
        at=record.at,
        rows=record.rows,
        tokens=record.tokens,
        parents=record.parents,
        by=by,
        why=[words.reasons.number(reason(record, node, words.known)) for node in nodes],
        path=record.path,
        committed=record.committed,
        text=record.text or [words.pieces[token] for token in record.committed],
        sources=[by[node] for node in record.path[1 : accepted + 1]] + [TARGET] * own,
        accepted=accepted,
        seconds=[record.seconds.get(phase, 0.0) for phase in PHASES],
        draft={node: _short(signal.prob) for node, signal in record.signals.items()},
        target={node: _short(prob) for judged in record.judged for node, prob in judged.children.items()},
        choices={judged.node: _short(judged.choice) for judged in record.judged},
        decision=_decision(record),
    )


def _decision(record: PassRecord) -> str:
    made = record.decision
    if made is None:
        return ""
    figures = f"{made.kept} of {made.drafted} verified, {made.expected:.2f} tokens expected, speedup {made.speedup:.2f}"
    return f"{made.reason} ({figures})"


def _stats(request: RequestTrace) -> Stats:
    stats = Stats()
    for record, step in zip(request.passes, request.steps, strict=True):
        stats.add(step)
        for name, spent in record.seconds.items():
            stats.seconds[name] = stats.seconds.get(name, 0.0) + spent
    return stats


def _totals(trace: Trace, stats: list[Stats]) -> dict[str, Any]:
    """Totals of all requests; the time of a pass that several requests shared counts once."""
    merged = Stats()
    for one in stats:
        merged = merged.merge(one)
    spent, group, shared = 0.0, None, set[int]()
    for record in sorted((p for request in trace.requests for p in request.passes), key=lambda p: p.at):
        if record.rows == 1 or record.seconds != group or record.request in shared:
            spent, group, shared = spent + sum(record.seconds.values()), record.seconds, set()
        shared.add(record.request)
    return merged.to_dict() | {"seconds": spent}


def _pieces(trace: Trace) -> dict[int, str]:
    """The text of every token that occurs; in a trace without a tokenizer, its number."""
    used: set[int] = set()
    for request in trace.requests:
        used.update(request.prompt)
        for record in request.passes:
            used.update(record.tokens, record.committed)
    return {token: trace.pieces.get(token, f"⟨{token}⟩") for token in sorted(used)}


def _names(found: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(found))


def _settings(sampling: dict[str, Any]) -> str:
    """The settings that differ from the defaults."""
    usual = asdict(Sampling())
    changed = [f"{name} {value}" for name, value in sampling.items() if value != usual.get(name)]
    return ", ".join(changed if sampling.get("temperature") else ["greedy", *changed])


def _short(prob: float) -> float | None:
    """Round to six significant digits; None for a number that is not finite."""
    return float(f"{prob:.6g}") if math.isfinite(prob) else None
