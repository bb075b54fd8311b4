"""Errors that a user can act on: each message names the cause and, where there is one, the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OutpaceError(Exception):
    """Base of every error that Outpace raises on purpose."""


class UsageError(OutpaceError, ValueError):
    """An argument is wrong; nothing was run."""


class UnsupportedModel(OutpaceError):
    """This model cannot be used here; the message names it and says why."""


class HeadNotFound(UnsupportedModel, UsageError):
    """No head can draft for this model, or none that was trained for it is there."""


class RequestFailed(OutpaceError):
    """One request could not go on; others in its batch are not touched."""


class CacheFull(RequestFailed):
    """The key-value cache has no room for what this slot needs."""

    def __init__(self, message: str, slot: int):
        super().__init__(message)
        self.slot = slot


def unknown(kind: str, name: object, known: Iterable[str]) -> UsageError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UsageError(f"unknown {kind} {name!r}{hint} (known: {', '.join(names)})")
