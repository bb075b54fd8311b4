"""Worker: the only thread that touches a model. Callers on all other threads post commands to it.

The worker steps the engine pass by pass. Commands (submit, cancel, clear) run between passes, in order of arrival. So
passes of several callers never mix, and no lock is held while user code runs. The thread starts with the first command
and ends after an idle period.
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
from outpace.threads.collector import collect_as_before, collect_rarely
from outpace.threads.compute_threads import release_threads

T = TypeVar("T")
SOON = 0.05  # seconds without work after which the thread releases its compute threads
IDLE = 2.0  # further seconds without work after which the thread ends
LAST_PASS = 10.0  # seconds that process exit waits for a running pass
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
_joining = threading.Lock()


class Serving(Protocol):
    """An object that a worker steps, such as an engine."""

    def serve(self) -> bool:
        """Run one pass; return False when nothing is left to do."""


class Worker:
    """A thread that runs passes, and posted commands between them."""

    def __init__(self) -> None:
        self._reset()
        _workers.add(self)

    def __reduce__(self) -> tuple[type[Worker], tuple[()]]:
        """Copy or pickle as a new worker, so that every copy of a model has its own."""
        return Worker, ()

    def _reset(self) -> None:
        self._lock = threading.RLock()  # reentrant: a finalizer may post while its thread is posting; held only briefly
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._active: list[Serving] = []
        self._thread: threading.Thread | None = None
        self._successor: Worker | None = None  # does the work of this worker since they were joined
        self._stopping = False
        self._busy = False  # it runs passes, so the garbage collector runs rarely

    @property
    def current(self) -> Worker:
        """The worker that does the work of this one: itself, unless it was joined to another worker."""
        worker = self
        while worker._successor is not None:
            worker = worker._successor
        return worker

    @property
    def here(self) -> bool:
        """Whether the caller is on the worker's thread."""
        return self.current._thread is threading.current_thread()

    def post(self, command: Callable[[], object]) -> None:
        """Queue a command to run between passes, and return without waiting."""
        worker = self.current
        with worker._lock:
            if worker._successor is None:
                worker._inbox.put(command)
                worker._start()
                return
        worker.post(command)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function between passes, wait, and return its result or raise its error."""
        if self.here:
            raise UsageError(
                "this model is in the middle of a pass: a logits processor, a drafter or a stop rule cannot use the "
                "model that calls it"
            )
        release_threads()
        future: Future[T] = Future()
        self.post(partial(_run_into, future, function, ThreadSettings.of_this_thread()))
        return future.result()

    def serve(self, served: Serving) -> None:
        """Step `served` until it has nothing left to do. Call this only from a command, on the worker's thread."""
        if served not in self.current._active:
            self.current._active.append(served)

    def join(self, other: Worker) -> None:
        """Let one thread do the work of both workers from now on, because they share a model."""
        if self.current is not other.current:
            with _joining:
                successor, worker = self.current, other.current
                if successor is not worker:
                    worker.call(partial(worker._hand_over, successor))

    def _hand_over(self, successor: Worker) -> None:
        with self._lock:
            self._successor = successor
            while not self._inbox.empty():
                successor.post(self._inbox.get())
        for served in self._active:
            successor.post(partial(successor.serve, served))
        self._active.clear()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="outpace", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while self._obey():
            self._set_busy(bool(self._active))
            for served in list(self._active):
                if self._stopping or not served.serve():
                    self._active.remove(served)
                del served  # so that a waiting thread does not keep an unused model alive
            self._set_busy(bool(self._active))
        self._set_busy(False)

    def _set_busy(self, busy: bool) -> None:
        if busy != self._busy:
            self._busy = busy
            (collect_rarely if busy else collect_as_before)()

    def _obey(self) -> bool:
        """Run posted commands, waiting for one if no pass has to run; return False if the thread may end."""
        command = self._next(0.0 if self._active else SOON)
        if command is None and not self._active:
            release_threads()  # other threads may compute now
            command = self._next(IDLE)
            if command is None:
                with self._lock:
                    if self._inbox.empty():
                        self._thread = None
                        return False
        while command is not None:
            command()
            if self._stopping or self._successor is not None:
                return False
            command = self._next(0.0)
        return True

    def _next(self, seconds: float) -> Callable[[], object] | None:
        """Return the next posted command, or None if none arrives within `seconds`."""
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
            self._stopping, self._thread = False, None  # code that runs later at exit may start a new thread


class ThreadSettings(NamedTuple):
    """The per-thread settings of torch, which a caller expects its passes to use."""

    threads: int
    device: int | None  # current CUDA device

    @classmethod
    def of_this_thread(cls) -> ThreadSettings:
        device = None
        if torch.cuda.is_initialized():
            device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
            if stream != torch.cuda.default_stream():
                stream.synchronize()  # finish the caller's work there, such as new weights, before a pass reads it
        return cls(torch.get_num_threads(), device)

    def hold(self) -> None:
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if self.device is not None:
            torch.cuda.set_device(self.device)


def _run_into(future: Future[T], function: Callable[[], T], settings: ThreadSettings) -> None:
    settings.hold()
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


@atexit.register
def _stop_all() -> None:
    """Stop all workers, because the interpreter must not exit in the middle of a pass."""
    for worker in list(_workers):
        worker._stop()


def _forked() -> None:
    """Reset all workers in a forked child, which has none of its parent's threads."""
    for worker in list(_workers):
        worker._reset()


os.register_at_fork(after_in_child=_forked)
