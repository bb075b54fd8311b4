"""The channel on which the first process tells the others what to do, beside the group that runs the layers.

It is a group of its own, on the CPU, that waits for ever: between two requests nothing is sent. A process that ends
closes its connections, so the others notice at once.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from outpace.models.tensor_parallel.processes import ProcessLost

FOREVER = timedelta(days=365)
SETTLING = timedelta(seconds=30)  # for all processes to notice that a call has failed
SIZE = 4096  # bytes of a message; what is longer follows in a second one
HEADER = 8


class Channel:
    """Messages from the first process to all others."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=FOREVER)
        self._buffer = torch.zeros(SIZE, dtype=torch.uint8)

    def send(self, message: object) -> None:
        """Send an object to all other processes. It must be possible to pickle it."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._buffer[:HEADER] = _bytes(len(data).to_bytes(HEADER, "little"))
        inline = min(len(data), SIZE - HEADER)
        self._buffer[HEADER : HEADER + inline] = _bytes(data[:inline])
        self._broadcast(self._buffer)
        if inline < len(data):
            self._broadcast(_bytes(data[inline:]))

    def receive(self) -> Any:
        """Wait for the next object of the first process."""
        self._broadcast(self._buffer)
        held = self._buffer.numpy().tobytes()
        length = int.from_bytes(held[:HEADER], "little")
        data = held[HEADER : HEADER + length]
        if len(data) < length:
            rest = torch.empty(length - len(data), dtype=torch.uint8)
            self._broadcast(rest)
            data += rest.numpy().tobytes()
        return pickle.loads(data)

    def meet(self, patience: timedelta) -> None:
        """Wait until all processes are here; raise `ProcessLost` if one does not come in time."""
        try:
            dist.monitored_barrier(self._group, timeout=patience)
        except RuntimeError as error:
            raise ProcessLost from error

    def close(self) -> None:
        """Leave the group of processes, without which the process could not end in order."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _broadcast(self, data: torch.Tensor) -> None:
        try:
            dist.broadcast(data, 0, group=self._group)
        except RuntimeError as error:
            raise ProcessLost from error


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
