"""GPU memory that grows in place: addresses are reserved once, and pages are mapped behind them when they are needed.

A growing KV cache is then neither copied nor allocated twice, and graphs that read it stay valid. It uses the virtual
memory functions of the CUDA driver, which PyTorch does not offer for a tensor.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

PINNED, DEVICE, READ_WRITE, OUT_OF_MEMORY = 1, 1, 3, 2  # constants of the driver
COARSE = 8  # pages of each part that a limit must allow
FIRST_ENTRIES, FIRST_SHARE = 2**14, 64  # entries at first; at most this fraction of the memory
TYPES = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8"}  # bytes of an element -> its type in `__cuda_array_interface__`


class Location(ctypes.Structure):
    """CUmemLocation of the driver."""

    _fields_ = (("type", ctypes.c_int), ("device", ctypes.c_int))


class Allocation(ctypes.Structure):
    """CUmemAllocationProp of the driver."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc of the driver."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


@cache
def driver() -> ctypes.CDLL | None:
    """Return the CUDA driver, or None on a machine without one."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    try:
        found = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return found if hasattr(found, "cuMemAddressReserve") else None


def call(name: str, *given: Any) -> None:
    """Call a function of the driver; raise an error if it fails."""
    library = driver()
    assert library is not None, "the caller has looked for the driver"
    code = getattr(library, name)(*given)
    if code == OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: the GPU has no memory left")
    if code:
        raise RuntimeError(f"{name} failed with code {code} of the CUDA driver")


class AddressRange:
    """Reserved addresses, of which some have memory. Tensors over them keep it alive."""

    def __init__(self, size: int, device: torch.device):
        self.size, self.location = size, Location(DEVICE, device.index or 0)
        self.pages: list[tuple[int, int, ctypes.c_uint64]] = []  # address, bytes and handle of each mapping
        start = ctypes.c_uint64()
        call("cuMemAddressReserve", ctypes.byref(start), ctypes.c_size_t(size), ctypes.c_size_t(0), 0, 0)
        self.start: int = start.value

    def map(self, offset: int, size: int) -> None:
        """Put memory behind a part of the addresses."""
        kind, handle = Allocation(PINNED, 0, self.location), ctypes.c_uint64()
        call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(kind), 0)
        place, length = ctypes.c_uint64(self.start + offset), ctypes.c_size_t(size)
        self.pages.append((place.value, size, handle))
        call("cuMemMap", place, length, ctypes.c_size_t(0), handle, 0)
        call("cuMemSetAccess", place, length, ctypes.byref(Access(self.location, READ_WRITE)), ctypes.c_size_t(1))

    def unmap_last(self, count: int) -> None:
        """Give the memory of the last `count` mappings back."""
        library = driver()
        assert library is not None, "addresses came from the driver"
        for address, size, handle in self.pages[len(self.pages) - count :]:
            library.cuMemUnmap(ctypes.c_uint64(address), ctypes.c_size_t(size))
            library.cuMemRelease(handle)
        del self.pages[len(self.pages) - count :]

    def __del__(self) -> None:
        library = driver()
        if library is not None and hasattr(self, "start"):  # it may have failed before
            torch.cuda.synchronize()  # a pass may still read it
            self.unmap_last(len(self.pages))
            library.cuMemAddressFree(ctypes.c_uint64(self.start), ctypes.c_size_t(self.size))


def granularity(device: torch.device) -> int:
    """Return the size of a page in bytes."""
    found = ctypes.c_size_t()
    kind = Allocation(PINNED, 0, Location(DEVICE, device.index or 0))
    call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(kind), 0)
    return found.value


class GrowingTensor:
    """A tensor `[*parts, entries, *entry]` whose number of entries grows in place, up to what the GPU can hold."""

    def __init__(self, parts: tuple[int, ...], entry: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.parts = math.prod(parts)
        self.entry_bytes = math.prod(entry) * dtype.itemsize
        self.page = granularity(device)
        self.step = self.page // math.gcd(self.page, self.entry_bytes)  # entries that end with a page
        total = torch.cuda.get_device_properties(device).total_memory
        most = -(-total // (self.parts * self.entry_bytes) // self.step) * self.step
        self.part_bytes = most * self.entry_bytes
        self.range = AddressRange(self.parts * self.part_bytes, device)
        self.entries = 0
        self._steps: list[int] = []  # the entries before each mapping
        self._map(self.step)  # PyTorch asks on which device the first address is
        self._all, self._axis = _tensor(self.range, (*parts, most, *entry), dtype, device), len(parts)
        self._all.narrow(self._axis, 0, self.entries).zero_()

    @property
    def tensor(self) -> Tensor:  # [*parts, entries, *entry]
        return self._all.narrow(self._axis, 0, self.entries)

    def grow(self, entries: int) -> None:
        """Make room for at least this many entries, with zeros. If memory runs out, the tensor stays as it is."""
        before = self.entries
        if entries > before:
            self._map(-(-entries // self.step) * self.step)
            self._all.narrow(self._axis, before, self.entries - before).zero_()

    def shrink(self, entries: int) -> None:
        """Give memory back, as it was added, but keep at least this many entries."""
        torch.cuda.synchronize()  # a pass may still read it
        while len(self._steps) > 1 and self._steps[-1] >= entries:
            self.range.unmap_last(self.parts)
            self.entries = self._steps.pop()

    def _map(self, entries: int) -> None:
        offset, size = self.entries * self.entry_bytes, (entries - self.entries) * self.entry_bytes
        mapped = len(self.range.pages)
        try:
            for part in range(self.parts):
                self.range.map(part * self.part_bytes + offset, size)
        except torch.OutOfMemoryError:
            self.range.unmap_last(len(self.range.pages) - mapped)
            raise
        self._steps.append(self.entries)
        self.entries = entries


def growing(
    parts: tuple[int, ...], entry: tuple[int, ...], dtype: torch.dtype, device: torch.device, limit: int | None
) -> GrowingTensor | None:
    """Return a tensor that grows in place, where the device offers it and pages are small beside the limit in bytes."""
    if device.type != "cuda" or driver() is None:
        return None
    count = math.prod(parts)
    if limit is not None and limit < COARSE * count * granularity(device):
        return None
    memory, total = GrowingTensor(parts, entry, dtype, device), torch.cuda.get_device_properties(device).total_memory
    memory.grow(min(FIRST_ENTRIES, (limit or total) // FIRST_SHARE // (count * memory.entry_bytes)))
    return memory


class Exported:
    """Addresses in the form in which PyTorch takes them over."""

    def __init__(self, owner: AddressRange, shape: tuple[int, ...], itemsize: int):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": TYPES[itemsize], "data": (owner.start, False), "version": 3,
        }  # fmt: skip


def _tensor(owner: AddressRange, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.as_tensor(Exported(owner, shape, dtype.itemsize), device=device).view(dtype)
