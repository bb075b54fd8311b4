"""Worker: the one thread that touches a model. Everyone else posts commands to it, from any thread.

An engine is stepped here, pass by pass; commands (submit, cancel, clear) run between passes, in the order in which they
came. So passes of several callers never mix, and no lock is held while code of a user runs. The thread starts with the
first command and ends when it has been idle for a while.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol, TypeVar

import torch

from outpace.errors import UsageError
from outpace.threads.compute_threads import give_back

T = TypeVar("T")
SOON = 0.05  # seconds without work after which the thread gives its compute threads back
IDLE = 2.0  # and those after which it ends
LAST_PASS = 10.0  # seconds that the end of the process waits for a pass under way
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
_joining = threading.Lock()


class Serving(Protocol):
    """What a worker steps, such as an engine."""

    def serve(self) -> bool:
        """Run one pass; False when nothing is left to do."""


class Worker:
    """A thread that runs passes, and between them the commands that were posted."""

    def __init__(self) -> None:
        self._reset()
        _workers.add(self)

    def __reduce__(self) -> tuple[type[Worker], tuple[()]]:
        """A copy of what a worker serves, in this process or another one, has a worker of its own."""
        return Worker, ()

    def _reset(self) -> None:
        self._lock = threading.RLock()  # a finalizer may post while its own thread does; held for moments only
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._active: list[Serving] = []
        self._thread: threading.Thread | None = None
        self._heir: Worker | None = None  # does the work of this one, since they were joined
        self._stopping = False

    @property
    def current(self) -> Worker:
        """The worker that does the work of this one: itself, unless it was joined to another."""
        worker = self
        while worker._heir is not None:
            worker = worker._heir
        return worker

    @property
    def here(self) -> bool:
        """Whether the caller is on the worker's own thread."""
        return self.current._thread is threading.current_thread()

    def post(self, command: Callable[[], object]) -> None:
        """Run this between passes, soon; the caller does not wait."""
        worker = self.current
        with worker._lock:
            if worker._heir is None:
                worker._inbox.put(command)
                worker._start()
                return
        worker.post(command)

    def call(self, function: Callable[[], T]) -> T:
        """Run this between passes, and give back what it returns or raises."""
        if self.here:
            raise UsageError(
                "this model is in the middle of a pass: a logits processor, a drafter or a stop rule cannot use the "
                "model that calls it"
            )
        give_back()
        answer: Future[T] = Future()
        self.post(partial(_answer, answer, function, ThreadSettings.of_this_thread()))
        return answer.result()

    def serve(self, served: Serving) -> None:
        """Step this until it has nothing left to do. For commands: it is called on the worker's thread."""
        if served not in self.current._active:
            self.current._active.append(served)

    def join(self, other: Worker) -> None:
        """From now on one thread does the work of both, because they share a model."""
        if self.current is not other.current:
            with _joining:
                heir, worker = self.current, other.current
                if heir is not worker:
                    worker.call(partial(worker._hand_over, heir))

    def _hand_over(self, heir: Worker) -> None:
        with self._lock:
            self._heir = heir
            while not self._inbox.empty():
                heir.post(self._inbox.get())
        for served in self._active:
            heir.post(partial(heir.serve, served))
        self._active.clear()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outpace", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while self._obey():
            for served in list(self._active):
                if self._stopping or not served.serve():
                    self._active.remove(served)
                del served  # a model that is not used any more is not held by a thread that waits

    def _obey(self) -> bool:
        """Run what was posted; wait for it while there is no pass to run. False: the thread may end."""
        command = self._next(0.0 if self._active else SOON)
        if command is None and not self._active:
            give_back()  # others may compute now
            command = self._next(IDLE)
            if command is None:
                with self._lock:
                    if self._inbox.empty():
                        self._thread = None
                        return False
        while command is not None:
            command()
            if self._stopping or self._heir is not None:
                return False
            command = self._next(0.0)
        return True

    def _next(self, seconds: float) -> Callable[[], object] | None:
        """What was posted first; None if nothing comes for so long."""
        try:
            return self._inbox.get(timeout=seconds) if seconds else self._inbox.get_nowait()
        except Empty:
            return None

    def _stop(self) -> None:
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._stopping = True
            self._inbox.put(lambda: None)
            thread.join(LAST_PASS)
            self._stopping, self._thread = False, None  # what runs at the very end of a process may start another


class ThreadSettings(NamedTuple):
    """What torch keeps for each thread by itself, and a caller expects to hold for its passes."""

    threads: int
    device: int | None  # of CUDA

    @classmethod
    def of_this_thread(cls) -> ThreadSettings:
        device = None
        if torch.cuda.is_initialized():
            device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
            if stream != torch.cuda.default_stream():
                stream.synchronize()  # what the caller began there, such as new weights, is done before a pass reads it
        return cls(torch.get_num_threads(), device)

    def hold(self) -> None:
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if self.device is not None:
            torch.cuda.set_device(self.device)


def _answer(answer: Future[T], function: Callable[[], T], settings: ThreadSettings) -> None:
    settings.hold()
    try:
        answer.set_result(function())
    except BaseException as error:
        answer.set_exception(error)


@atexit.register
def _stop_all() -> None:
    """The interpreter must not end in the middle of a pass."""
    for worker in list(_workers):
        worker._stop()


def _forked() -> None:
    """A child process has none of its parent's threads."""
    for worker in list(_workers):
        worker._reset()


os.register_at_fork(after_in_child=_forked)
