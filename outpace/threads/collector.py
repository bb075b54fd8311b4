"""Collector: makes Python's garbage collector run rarely while a model runs passes.

A pass makes many short-lived objects, which need no collector: they are freed when the last reference goes. But their
number starts collections, and now and then one that scans every object of the process. That takes 0.2 s, in the middle
of an answer. So collections start later while any worker runs passes. Garbage is still collected, and an explicit
`gc.collect()` still collects everything.
"""

from __future__ import annotations

import gc
import os
import threading

RARE = 100_000  # new objects before a collection; a pass of 256 requests has about 15,000

_lock = threading.Lock()
_busy = 0  # workers that run passes
_before: int | None = None  # the threshold to restore; None: it was not changed


def collect_rarely() -> None:
    """Start collections later from now on, unless collections are off or start even later."""
    global _busy, _before
    with _lock:
        _busy += 1
        young, *rest = gc.get_threshold()
        if _busy == 1 and 0 < young < RARE:
            _before = young
            gc.set_threshold(RARE, *rest)


def collect_as_before() -> None:
    """Undo one call of `collect_rarely`. A threshold that was set meanwhile stays."""
    global _busy, _before
    with _lock:
        _busy -= 1
        young, *rest = gc.get_threshold()
        if _busy == 0 and _before is not None:
            if young == RARE:
                gc.set_threshold(_before, *rest)
            _before = None


def _forked() -> None:
    """Restore the threshold in a forked child, which has none of its parent's workers."""
    global _lock, _busy
    _lock = threading.Lock()
    if _busy:
        _busy = 1
        collect_as_before()


os.register_at_fork(after_in_child=_forked)
