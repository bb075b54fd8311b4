"""The server of the soak: `outpace serve` as it is, with faults that a request or a signal asks for.

    python benchmarks/soak_server.py smollm2-135m-instruct 8123 8       # port, slots

A request with one of the seeds below fails in the middle of its answer, by an error of its own code. After SIGUSR1 the
next pass breaks, and with it all requests that run. `GET /soak` counts what is held.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

from torch import Tensor

import outpace
from outpace.api.model import Model
from outpace.api.request import Request
from outpace.core.drafter import Drafter
from outpace.core.sequence import Sequence
from outpace.core.tree import Budget, Tree
from outpace.serve.jobs.admission import QueuePlace
from outpace.serve.jobs.run import JobRun
from outpace.serve.launch import server_of
from outpace.serve.service import Service
from outpace.serve.settings import ServeLimits, ServeSettings
from outpace.serve.web.event_stream import EventStream

NAME = "soak"
KEYS = {"ann": "key-of-ann", "bob": "key-of-bob", "eve": "key-of-eve"}
BROKEN_PROCESSOR, BROKEN_DRAFTER = 666_001, 666_002  # seeds
BEFORE = 3  # tokens before the fault
WAITING = 24
PREPARE_SECONDS = 60.0  # on a machine that others use too, the usual 10 may pass while nothing is computed
DRAIN_SECONDS = 60.0
KEPT = (Sequence, JobRun, QueuePlace, EventStream)  # what must not outlive its request
TEMPLATE = (
    '{% if tools %}<|im_start|>system\nCall as <tool_call>{"name": ..., "arguments": ...}</tool_call>: '
    "{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class InjectedError(Exception):
    """A fault that the soak asked for."""


class LateFault:
    """A logits processor that raises an error in the middle of an answer."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tokens: Tensor, logits: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > BEFORE:
            raise InjectedError("a logits processor broke")
        return logits


class BrokenDrafter(Drafter):
    """A method that raises an error in the middle of an answer."""

    name = "broken"

    def propose(self, seq: Sequence, budget: Budget) -> Tree:
        if len(seq.generated) > BEFORE:
            raise InjectedError("a drafter broke")
        return Tree([seq.tokens[-1]])


def with_tools(model: Model) -> Model:
    """Give a model a chat template that has tools, as the demo model's has none."""
    tokenizer: Any = model.tokenizer
    tokenizer.chat_template = TEMPLATE
    return model


def inject_faults(model: Model) -> None:
    """Let requests and a signal break a pass."""
    usual, score, broken = model.sequence, model.lm.score, threading.Event()

    def sequence(request: Request, stream: int = 0) -> Sequence:
        if request.sampling.seed == BROKEN_PROCESSOR:
            request = replace(request, logits_processors=(LateFault(),))
        elif request.sampling.seed == BROKEN_DRAFTER:
            request = replace(request, method=BrokenDrafter(), options={})
        return usual(request, stream)

    def breakable(*given: Any, **settings: Any) -> Any:
        if broken.is_set():
            broken.clear()
            raise InjectedError("a pass broke")
        return score(*given, **settings)

    vars(model)["sequence"], vars(model.lm)["score"] = sequence, breakable
    signal.signal(signal.SIGUSR1, lambda *_: broken.set())


def held(service: Service) -> dict[str, int]:
    """Count what the server holds. Without requests, all is 0 but the tasks, of which this request is one."""
    gc.collect()
    kinds = Counter(type(each).__name__ for each in gc.get_objects() if type(each) in KEPT)
    admission, lm = service.admission, service.model.lm
    return {
        "asyncio tasks": len(asyncio.all_tasks()),
        "busy slots": sum(slot.busy for slot in getattr(lm, "slots", ())),
        "requests in the engine": len(service.model.engine.scheduler.all),
        "running places": admission.running,
        "waiting places": admission.pending,
        "open streams": service.pace.streams,
        **{f"{kind.__name__} objects": kinds[kind.__name__] for kind in KEPT},
    }


def run(model: Model, port: int, slots: int) -> None:
    """Serve a model until a signal stops it."""
    inject_faults(with_tools(model))
    model.max_batch = slots
    limits = ServeLimits(waiting=WAITING, prepare_seconds=PREPARE_SECONDS)
    server = server_of(
        model, ServeSettings((NAME,), NAME, port=port, keys=KEYS, drain_seconds=DRAIN_SECONDS, limits=limits)
    )

    async def count() -> dict[str, int]:
        return held(server.service)

    app: Any = server.config.app
    app.add_api_route("/soak", count)
    server.run()


if __name__ == "__main__":
    run(outpace.load(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
