"""ResponseStore: replies of /v1/responses that are kept for a while, within a number and a size."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any

from outpace.serve.jobs.admission import Owner
from outpace.serve.settings import ServeLimits
from outpace.serve.web.failures import APIFailure


@dataclass(frozen=True)
class StoredResponse:
    """A reply, and the conversation that it ends, without instructions."""

    owner: Owner
    body: dict[str, Any]
    messages: list[dict[str, Any]]

    @property
    def size(self) -> int:
        return len(json.dumps(self.body)) + len(json.dumps(self.messages))


class ResponseStore:
    """Replies by id. When there are too many, those used longest ago are dropped."""

    def __init__(self, limits: ServeLimits):
        self._limits = limits
        self._kept: dict[str, tuple[StoredResponse, int]] = {}  # with sizes; the one used last is last
        self._size = 0
        self._lock = threading.Lock()  # jobs are made on threads

    def add(self, id: str, response: StoredResponse) -> None:
        with self._lock:
            self._kept[id] = (response, response.size)
            self._size += self._kept[id][1]
            while len(self._kept) > self._limits.stored or (self._size > self._limits.stored_bytes):
                self._drop(next(iter(self._kept)))

    def get(self, id: str, owner: Owner) -> StoredResponse:
        """Return a reply of this owner; what belongs to others does not exist."""
        with self._lock:
            found = self._kept.get(id)
            if found is None or found[0].owner != owner:
                raise APIFailure(f"there is no response {id!r}", 404, code="response_not_found")
            self._kept[id] = self._kept.pop(id)
            return found[0]

    def remove(self, id: str, owner: Owner) -> None:
        self.get(id, owner)
        with self._lock:
            if id in self._kept:
                self._drop(id)

    def _drop(self, id: str) -> None:
        self._size -= self._kept.pop(id)[1]
