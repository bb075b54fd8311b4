"""Reads logits where llama.cpp keeps them.

cyllama returns logits as a Python list, and for a large vocabulary that takes as long as a pass. llama.cpp keeps the
rows of its last call in one array, and its context has the address. The address is found by comparison: the word of the
context that points to the same numbers as the list. Words are read through /proc/self/mem, where a wrong address is an
error and not a crash. The first rows that are read are compared with their lists, too. If they differ, or nothing is
found, as on other systems than Linux, rows are read as lists. `OUTPACE_RAW_LOGITS=0` always reads lists.
"""

from __future__ import annotations

import ctypes
import os
import struct
from array import array
from typing import Any

import torch
from torch import Tensor

WORD = 8  # bytes of an address
SPAN = 4096  # bytes of llama.cpp's context that are searched
LOWEST, HIGHEST = 1 << 16, 1 << 47  # addresses of a process
COMPARED = 3  # rows that are compared with their lists
HEAD = 64  # bytes that are compared first


class RawLogits:
    """The rows of one llama.cpp context, after each of its calls."""

    def __init__(self, context: Any, vocab: int):
        self._context, self._vocab = context, vocab
        self._field = 0  # address of the word that points to the rows; 0: not found yet
        self._first = 0  # address of the rows when they were read last
        self._views: dict[int, Tensor] = {}  # rows that were read at this address
        self._left = COMPARED if os.environ.get("OUTPACE_RAW_LOGITS", "1") != "0" else 0

    def view(self, entry: int, row: int) -> Tensor:  # [vocab]
        """Return the logits of an entry of the last call, valid until the next one. `row` is its place among the
        entries whose logits were wanted."""
        if self.found:
            return self._in_place(row)
        listed = torch.frombuffer(array("f", self._context.get_logits_ith(entry)), dtype=torch.float32)
        if self._left:
            self._compare(listed, row)
        return listed

    def usable(self, entry: int, row: int) -> bool:
        """Whether rows are read in place; compares the first ones."""
        if self._left:
            self.view(entry, row)
        return self.found

    @property
    def found(self) -> bool:
        """Whether rows are read in place from now on."""
        return bool(self._field) and not self._left

    def _in_place(self, row: int) -> Tensor:
        first = ctypes.c_uint64.from_address(self._field).value
        if first != self._first:
            self._first, self._views = first, {}
        if row not in self._views:
            place = (ctypes.c_float * self._vocab).from_address(first + 4 * self._vocab * row)
            self._views[row] = torch.frombuffer(place, dtype=torch.float32)
        return self._views[row]

    def _compare(self, listed: Tensor, row: int) -> None:
        wanted = listed.numpy().tobytes()
        field = self._field or _field(self._context, wanted, 4 * self._vocab * row)
        same = field and _read(_address(field), len(wanted), 4 * self._vocab * row) == wanted
        self._field, self._left = (field, self._left - 1) if same else (0, 0)


def _field(context: Any, wanted: bytes, offset: int) -> int:
    """The address of the word in llama.cpp's context that points to these bytes, `offset` bytes ahead; 0: none."""
    for pointer in _words(_read(id(context), type(context).__basicsize__)):
        for place, word in enumerate(_words(_read(pointer, SPAN))):
            if _read(word, HEAD, offset) == wanted[:HEAD] and _read(word, len(wanted), offset) == wanted:
                return pointer + WORD * place
    return 0


def _address(field: int) -> int:
    return next(iter(_words(_read(field, WORD))), 0)


def _words(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"{len(data) // WORD}Q", data[: len(data) // WORD * WORD])


def _read(address: int, count: int, offset: int = 0) -> bytes:
    """Memory of this process; nothing where there is none."""
    if not LOWEST <= address < HIGHEST:
        return b""
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.pread(memory, count, address + offset)
    except OSError:
        return b""
    finally:
        os.close(memory)
