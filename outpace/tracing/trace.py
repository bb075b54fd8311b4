"""Trace: what every pass drafted, chose and kept, and how long it took, as JSON lines (docs/guide/traces.md).

`TraceLines` describes each event of the engine, and `TraceWriter` writes that to a file. `read` turns a file back into
records, with the same `steps` as in the run. The format has a version, and `read` refuses a file with a newer version
than it knows.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable, Iterator, Sequence as Seq
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from outpace import registry
from outpace.core.engine import Event
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import ROOT, Decision, Signal, Tree
from outpace.errors import OutpaceError
from outpace.storage.json_lines import read_lines
from outpace.text import TextStream, Tokenizer
from outpace.version import __version__

FORMAT, VERSION = "outpace-trace", 1
Line = dict[str, Any]


@dataclass(frozen=True)
class JudgedNode:
    """The target's probabilities of its choice at a node and of each child, if the trace records probabilities.

    They come from the distribution under the sampling settings; under greedy decoding, from the model's own.
    """

    node: int
    choice: float
    children: dict[int, float]  # child -> probability


@dataclass(frozen=True)
class PassRecord:
    """One pass of one request."""

    request: int
    at: float  # seconds from the start of the trace to the end of the pass
    rows: int  # number of requests that shared it
    tokens: list[int]  # of the tree, root first
    parents: list[int]
    by: list[str]  # source of each node; empty for the root
    path: list[int]  # accepted nodes, root first
    committed: list[int]  # committed tokens, in order
    seconds: dict[str, float]  # prefill, draft, score, verify, keep
    text: list[str] = field(default_factory=list)  # what each committed token added to the answer
    kept: list[int] = field(default_factory=list)  # nodes that stayed in the KV cache
    signals: dict[int, Signal] = field(default_factory=dict)  # node -> what the drafter knew
    chances: dict[int, float] = field(default_factory=dict)  # node -> estimated P(accepted | parent accepted)
    trusted: list[int] = field(default_factory=list)  # nodes that a lossy method committed without the target's choice
    judged: list[JudgedNode] = field(default_factory=list)
    decision: Decision | None = None  # why this part was verified, if the policy weighs costs

    @property
    def step(self) -> Step:
        """The step of the run, without the distributions that a draft drew from."""
        tree = Tree(
            list(self.tokens), list(self.parents), dict(self.signals), probs=dict(self.chances),
            trusted=set(self.trusted), decision=self.decision,
        )  # fmt: skip
        return Step(tree, list(self.path), list(self.committed), list(self.kept))

    @classmethod
    def from_line(cls, line: dict[str, Any]) -> PassRecord:
        signals = {int(n): Signal(p, h, tuple(top)) for n, (p, h, top) in line.pop("signals", {}).items()}
        probs = {int(node): prob for node, prob in line.pop("chances", {}).items()}
        judged = [
            JudgedNode(j["node"], j["choice"], {int(n): p for n, p in j["children"].items()})
            for j in line.pop("judged", [])
        ]
        decision = Decision(**line.pop("decision")) if "decision" in line else None
        return cls(**line, signals=signals, chances=probs, judged=judged, decision=decision)


@dataclass
class RequestTrace:
    """One request: its settings, its passes and its end."""

    id: int
    method: str
    verifier: str
    policy: str
    lossless: bool
    sampling: dict[str, Any]
    prompt: list[int]
    passes: list[PassRecord] = field(default_factory=list)
    finish_reason: str | None = None  # None: the trace breaks off
    error: str | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for p in self.passes for token in p.committed]

    @property
    def steps(self) -> list[Step]:
        return [p.step for p in self.passes]


@dataclass
class Trace:
    """A whole trace file."""

    header: dict[str, Any]
    requests: list[RequestTrace]
    pieces: dict[int, str]  # the text of each token that occurs


class TraceLines:
    """Describes requests and events as the lines of one trace; `TraceWriter` writes them, a server sends them."""

    def __init__(self, tokenizer: Tokenizer | None = None, model: str = "", probs: bool = False):
        self.tokenizer, self.model = tokenizer, model
        self.probs = probs
        self._ids: dict[int, int] = {}  # id of a sequence -> number of the request in this trace
        self._known: set[int] = set()
        self._start = time.perf_counter()

    def header(self) -> Line:
        """Return the first line."""
        versions = {"outpace": __version__, "torch": torch.__version__, "python": platform.python_version()}
        named = {"format": FORMAT, "version": VERSION, "model": self.model}
        return {"type": "header", **named, "probs": self.probs, "versions": versions}

    def begin(self, seqs: Seq[Sequence]) -> Iterator[Line]:
        """Yield the lines of requests that are about to run."""
        for seq in seqs:
            self._ids[seq.id] = len(self._ids)
            yield from self._pieces(seq.tokens)
            yield {
                "type": "request",
                "id": self._ids[seq.id],
                "method": seq.drafter.name or type(seq.drafter).__name__,
                "verifier": registry.name_of(seq.verifier, "verifier"),
                "policy": registry.name_of(seq.policy, "policy"),
                "lossless": seq.drafter.lossless and seq.verifier.lossless,
                "sampling": asdict(seq.sampler.sampling),
                "prompt": list(seq.tokens),
            }

    def event(self, event: Event) -> Iterator[Line]:
        """Yield the lines of an event of the engine."""
        seq, step = event.seq, event.step
        if step is not None:
            yield from self._pieces([*step.tree.tokens, *step.tokens])
            yield self._pass(event, step)
        if seq.finished:
            end = {} if seq.error is None else {"error": seq.error}
            yield {"type": "end", "request": self._ids[seq.id], "finish_reason": seq.finish_reason, **end}

    def _pass(self, event: Event, step: Step) -> Line:
        seq, tree = event.seq, step.tree
        own = seq.drafter.name or type(seq.drafter).__name__
        line: Line = {
            "type": "pass",
            "request": self._ids[seq.id],
            "at": round(time.perf_counter() - self._start, 6),
            "rows": event.batch_size,
            "tokens": tree.tokens,
            "parents": tree.parents,
            "by": ["", *(tree.sources.get(node, own) for node in range(1, len(tree)))],
            "path": step.path,
            "committed": step.tokens,
            "kept": step.kept,
            "seconds": {name: round(spent, 6) for name, spent in event.seconds.items()},
        }
        if isinstance(seq.watcher, TextStream):
            count = len(seq.generated)
            line["text"] = seq.watcher.texts(count - len(step.tokens), count)
        if tree.signals:
            line["signals"] = {n: [s.prob, s.entropy, list(s.top)] for n, s in tree.signals.items()}
        if tree.probs:
            line["chances"] = {node: round(prob, 6) for node, prob in tree.probs.items()}
        if tree.trusted and not seq.verifier.lossless:
            line["trusted"] = sorted(tree.trusted)
        if tree.decision is not None:
            line["decision"] = asdict(tree.decision)
        if self.probs:
            line["judged"] = [asdict(judged) for judged in _judge(event, step)]
        return line

    def _pieces(self, tokens: Seq[int]) -> Iterator[Line]:
        """Yield a line with the text of tokens that the trace does not have yet, if there are any."""
        new = sorted(set(tokens) - self._known)
        self._known.update(new)
        if new and self.tokenizer is not None:
            yield {"type": "pieces", "pieces": {token: self.tokenizer.decode([token]) for token in new}}


class TraceWriter:
    """Writes each event as soon as it happens, so the trace of an interrupted run can be read."""

    def __init__(self, path: str | Path, tokenizer: Tokenizer | None = None, model: str = "", probs: bool = False):
        self._lines = TraceLines(tokenizer, model, probs)
        try:
            self._file: TextIO = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise OutpaceError(f"cannot write the trace: {error}") from error
        self._write([self._lines.header()])

    def begin(self, seqs: Seq[Sequence]) -> None:
        """Write the requests that are about to run."""
        self._write(self._lines.begin(seqs))

    def event(self, event: Event) -> None:
        """Write an event of the engine."""
        self._write(self._lines.event(event))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self._file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
            self._file.flush()


def _judge(event: Event, step: Step) -> Iterator[JudgedNode]:
    seq, scores = event.seq, event.scores
    assert scores is not None, "a pass has scores"
    start = len(seq.tokens) - len(step.tokens)
    for depth, (node, token) in enumerate(zip(step.path, step.tokens, strict=False)):
        distribution = seq.sampler.process(scores.logits[node], seq.tokens[: start + depth]).double().softmax(-1)
        children = {child: float(distribution[step.tree.tokens[child]]) for child in step.tree.children(node)}
        yield JudgedNode(node, float(distribution[token]), children)


def reason(record: PassRecord, node: int, pieces: dict[int, str]) -> str:
    """Explain in words why a node was accepted or not."""
    if node == ROOT:
        return "the root: committed by the previous pass"
    if node in record.path and node in record.trusted:
        return "accepted without the target: the method vouched for it"
    if node in record.path:
        return "accepted: the target chose it"
    parent = record.parents[node]
    if parent not in record.path:
        return "never judged: a token before it was rejected"
    depth = record.path.index(parent)
    if depth >= len(record.committed):
        return "never judged: the request had ended"
    chosen = pieces.get(record.committed[depth], f"token {record.committed[depth]}")
    judged = {j.node: j for j in record.judged}.get(parent)
    likely = f" (probability {judged.children[node]:.3f} against {judged.choice:.3f})" if judged is not None else ""
    return f"rejected: the target chose {chosen!r}{likely}"


def read(path: str | Path) -> Trace:
    """Read a trace file into records; a truncated last line is left out."""
    header, *lines = read_lines(
        path, FORMAT, VERSION, "an Outpace trace; make one with `outpace generate --trace FILE`"
    )
    trace = Trace(header, [], {})
    for number, line in enumerate(lines, start=2):
        try:
            _take(trace, line.pop("type"), line)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise OutpaceError(f"{str(path)!r}, line {number} is not a valid trace record: {error!r}") from error
    return trace


def _take(trace: Trace, kind: str, line: dict[str, Any]) -> None:
    """Add one line to the trace; unknown kinds, which a later version may add, are skipped."""
    if kind == "request":
        trace.requests.append(RequestTrace(**line))
    elif kind == "pass":
        trace.requests[line["request"]].passes.append(PassRecord.from_line(line))
    elif kind == "end":
        ended = trace.requests[line["request"]]
        ended.finish_reason, ended.error = line["finish_reason"], line.get("error")
    elif kind == "pieces":
        trace.pieces.update({int(token): piece for token, piece in line["pieces"].items()})
