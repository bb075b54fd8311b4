"""Kept: objects by key, such as drafters by name and options, kept so that each is used with what it has learned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any


class Kept:
    """Objects by key. When there are many, those that were not used for the longest time are dropped."""

    def __init__(self, most: int):
        self.most = most
        self._objects: dict[Hashable, Any] = {}  # the one used last is last
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the object of this key, made on first use."""
        with self._lock:
            if key in self._objects:
                return self._used(key, self._objects.pop(key))
        made = make()  # not under the lock, because a method may take a while to make
        with self._lock:  # another thread may have been faster
            return self._used(key, self._objects.pop(key, made))

    def _used(self, key: Hashable, found: Any) -> Any:
        self._objects[key] = found
        while len(self._objects) > self.most:
            del self._objects[next(iter(self._objects))]
        return found

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._objects.values()))
