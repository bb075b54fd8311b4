"""Errors that a user can act on. Each message names the cause and, if there is one, the fix."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


class OutpaceError(Exception):
    """Base class of every error that Outpace raises on purpose."""


class UsageError(OutpaceError, ValueError):
    """An argument is wrong; nothing was run."""


class UnsupportedModel(OutpaceError):
    """This model cannot be used here; the message names the model and the reason."""


class HeadNotFound(UnsupportedModel, UsageError):
    """No head can draft for this model, or no head trained for it was found."""


class RequestFailed(OutpaceError):
    """One request could not continue; the others in its batch are not affected."""


class CacheFull(RequestFailed):
    """The KV cache has no room for the tokens of this slot."""

    def __init__(self, message: str, slot: int):
        super().__init__(message)
        self.slot = slot


def check_ranges(owner: object, **ranges: tuple[float, float]) -> None:
    """Raise an error for an attribute outside its range, both ends included; None is always fine."""
    for name, (least, most) in ranges.items():
        value = getattr(owner, name)
        if value is not None and not least <= value <= most:
            bound = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise UsageError(f"{name}={value!r} of {type(owner).__name__} must be {bound}")


def unknown(kind: str, name: object, known: Iterable[str]) -> UsageError:
    """Build the error for an unknown name, with the closest known name as a hint."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UsageError(f"unknown {kind} {name!r}{hint} (known: {', '.join(names)})")
