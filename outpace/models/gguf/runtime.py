"""Runtime: llama.cpp through its Python binding: a cache of cells, sequences that share cells, and passes over them.

A token's logits must not depend on how many others are scored with it, or answers would differ with and without
speculation. With llama.cpp's default settings they do. With flash attention over q8_0 keys and float16 values they do
not, at the same speed, so we use these settings. Two cases remain (docs/guide/gguf.md). Weights of 16 and 32 bits are
multiplied differently for one token than for several, so a token of such a model is never computed alone. Weights that
llama.cpp has reordered are multiplied differently for four and more tokens, so these passes are split into calls.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.errors import OutpaceError, UnsupportedModel
from outpace.models.gguf.raw_logits import RawLogits
from outpace.sampling.top_k import likeliest, top_k

BATCH, PART = 2048, 512  # most tokens of a pass, and of the part of it that llama.cpp computes at a time
FEW = 3  # most tokens of a call that reordered weights multiply one by one
SEQUENCES = 256  # the most that llama.cpp can tell apart
DUMMY_SEQUENCE = SEQUENCES - 1  # the last sequence: a dummy token in it keeps another one from being alone
PROBE = tuple(range(1, 9))  # tokens
LEAST = 256  # cells of llama.cpp's smallest cache
FLASH = 1  # llama.cpp's constant for enabled flash attention


class NumberFormat(NamedTuple):
    """A number format of the cache."""

    kind: int  # llama.cpp's constant for it
    size: float  # bytes per number
    block: int  # numbers that are stored together


F16, Q8_0, BF16 = NumberFormat(1, 2.0, 1), NumberFormat(8, 34 / 32, 32), NumberFormat(30, 2.0, 1)


class BatchEntry(NamedTuple):
    """A token of a pass."""

    token: int
    position: int
    sequences: list[int]  # that it belongs to, and so sees
    wanted: bool = False  # whether its logits are needed


class EntryOutput(NamedTuple):
    """The output of a call at one of its entries."""

    logits: Tensor  # [vocab]
    likeliest: int


class File:
    """The model in a GGUF file."""

    def __init__(
        self,
        path: Path,
        offload: bool | None = None,
        bitwise: bool = True,
        together: int | None = None,
        paired: bool | None = None,
    ):
        """Load the file.

        `offload`: run on a GPU; None: if this build of llama.cpp supports one. `together`: reorder the weights for this
        processor, as with `bitwise=False`, but run calls of at most this many tokens. `paired`: whether no token may be
        computed alone; None: find out.
        """
        library = _library()
        if not path.is_file():
            raise OutpaceError(f"there is no file {str(path)!r}")
        if offload and not library.llama_supports_gpu_offload():
            raise OutpaceError(
                "this build of llama.cpp is CPU only: install one for your GPU, or leave out the device option"
            )

        class Model(library.LlamaModel):  # type: ignore[misc, name-defined]
            @property
            def n_vocab(self) -> int:  # the binding's contexts read it
                return self.get_vocab().n_vocab

        given = library.LlamaModelParams()
        given.n_gpu_layers = 0 if offload is False or not library.llama_supports_gpu_offload() else 1 << 10
        given.use_extra_bufts = together is not None or not bitwise
        try:
            self.model = Model(str(path), given)
        except (ValueError, RuntimeError, OSError) as error:
            raise OutpaceError(f"llama.cpp cannot load {str(path)!r}: {error}") from error
        self.path, self.tokens = path, self.model.get_vocab()
        if not self.model.has_decoder() or self.model.has_encoder():
            raise UnsupportedModel(f"{path.name} is not a decoder-only language model")
        if self.model.is_recurrent() or self.model.is_hybrid():
            raise UnsupportedModel(
                f"{path.name} has a recurrent state, which llama.cpp cannot roll back: run it as a Transformers model"
            )
        self.together = together or BATCH  # most tokens of a call
        self.paired = bool(paired)
        if bitwise and paired is None:
            self.paired = self._alone_is_different()

    def _alone_is_different(self) -> bool:
        """Return whether tokens get different logits when they run one by one instead of all at once."""
        entries, logits = [BatchEntry(token, i, [0], True) for i, token in enumerate(PROBE)], list[Tensor]()
        for passes in ([entries], [[entry] for entry in entries]):
            runtime = Runtime(self, LEAST)
            for one in passes:
                runtime.decode(one)
                logits += [runtime.logits(i) for i in range(len(one))]
        together, alone = logits[: len(PROBE)], logits[len(PROBE) :]
        return not all(map(torch.equal, together, alone))

    @property
    def vocab(self) -> int:
        return self.tokens.n_vocab

    @property
    def largest_pass(self) -> int:
        """The most tokens of a pass; if none may be computed alone, no more than llama.cpp computes together."""
        return PART - 1 if self.paired else BATCH

    @property
    def token_bytes(self) -> int:
        """Bytes of the cache per token."""
        model = self.model
        return int(model.n_layer * self._head * model.n_head_kv * (self.keys.size + F16.size))

    @property
    def keys(self) -> NumberFormat:
        """The number format of keys: q8_0, or bfloat16 if a head's size is not a multiple of q8_0's block."""
        return BF16 if self._head % Q8_0.block else Q8_0

    @property
    def _head(self) -> int:
        """The size of a key."""
        length = self.metadata(f"{self.metadata('general.architecture')}.attention.key_length")
        return int(length) if length else self.model.n_embd // self.model.n_head

    def metadata(self, key: str) -> str | None:
        """Return an entry of the file's metadata, or None."""
        try:
            return self.model.meta_val_str(key) or None
        except (KeyError, ValueError, RuntimeError):
            return None


class Runtime:
    """A cache with a number of cells, and passes over it. Cells are taken in order while none before them is free."""

    def __init__(self, file: File, cells: int, together: int | None = None):
        library = _library()
        given = library.LlamaContextParams()
        given.n_ctx, given.n_batch, given.n_ubatch, given.n_seq_max = cells, BATCH, PART, SEQUENCES
        given.n_threads = given.n_threads_batch = torch.get_num_threads()
        given.kv_unified, given.no_perf = True, True
        given.flash_attn_type, given.type_k, given.type_v = FLASH, file.keys.kind, F16.kind
        try:
            self._context = library.LlamaContext(file.model, given)
        except (ValueError, RuntimeError) as error:
            raise OutpaceError(
                f"llama.cpp cannot make a cache of {cells} tokens for {file.path.name}: {error}"
            ) from error
        self._batch = library.LlamaBatch(n_tokens=BATCH, embd=0, n_seq_max=SEQUENCES)
        self._greedy = library.LlamaSampler()
        self._greedy.add_greedy()
        self.cells, self.passes, self._paired, self._together = cells, 0, file.paired, together or file.together
        self._raw = RawLogits(self._context, file.vocab)
        self._rows: dict[int, int] = {}  # entry of the last call -> its row of logits
        self._first = 0  # the first entry of the last call
        self._earlier: dict[int, EntryOutput] = {}  # outputs of the calls before it

    @property
    def in_place(self) -> bool:
        """Whether reading logits costs no copy."""
        return self._raw.found

    def decode(self, entries: Seq[BatchEntry]) -> None:
        """Run a pass, in several calls where too many tokens together would get other logits."""
        self.passes += 1
        self._earlier, calls = {}, range(0, len(entries), self._together)
        for first in calls:
            part = entries[first : first + self._together]
            self._call(part)
            self._first = first
            if first != calls[-1]:  # the next call overwrites the output of this one
                outputs = {
                    first + i: EntryOutput(self._raw.view(i, self._rows[i]).clone(), self._likeliest(i))
                    for i, e in enumerate(part)
                    if e.wanted
                }
                self._earlier |= outputs

    def _call(self, entries: Seq[BatchEntry]) -> None:
        self._batch.clear()
        wanted = [i for i, entry in enumerate(entries) if entry.wanted]
        self._rows = {entry: row for row, entry in enumerate(wanted)}
        for entry in entries:
            self._batch.add(*entry)
        if self._paired and (len(entries) == 1 or sum(entry.wanted for entry in entries) == 1):
            self._batch.add(entries[0].token, 0, [DUMMY_SEQUENCE], True)
            self._context.decode(self._batch)
            self.remove(DUMMY_SEQUENCE, 0)
        else:
            self._context.decode(self._batch)

    def logits(self, index: int) -> Tensor:  # [vocab]
        """Return the logits at one of the pass's entries."""
        return self.peek(index).clone()

    def peek(self, index: int) -> Tensor:  # [vocab]
        """Return the same where llama.cpp keeps them, valid until the next pass."""
        if index < self._first:
            return self._earlier[index].logits
        return self._raw.view(index - self._first, self._rows[index - self._first])

    def greedy(self, index: int) -> int:
        """Return the likeliest token there, found without copying all logits."""
        return self._earlier[index].likeliest if index < self._first else self._likeliest(index - self._first)

    def top_k(self, index: int, k: int) -> Tensor:  # [1, k]
        """Return the k likeliest tokens at an entry."""
        return top_k(self.peek(index)[None], k)

    def _likeliest(self, index: int) -> int:
        row = self._rows[index]
        if not self._raw.usable(index, row):
            return self._greedy.sample(self._context, index)
        return likeliest(self._raw.view(index, row)).tokens[0]

    def share(self, source: int, target: int, first: int, end: int) -> None:
        """Add the tokens of a sequence at these positions to another sequence."""
        self._context.memory_seq_cp(source, target, first, end)

    def remove(self, sequence: int, first: int) -> None:
        """Remove the tokens from this position on from a sequence; cells that no sequence uses become free."""
        self._context.memory_seq_rm(sequence, first, -1)

    def clear(self) -> None:
        self._context.kv_cache_clear()


def identity(path: Path) -> str:
    """Return a string that identifies a file without reading it."""
    at = path.stat()
    return f"{path.name}, {at.st_size} bytes, {at.st_mtime_ns}"


def _library() -> Any:
    try:
        from cyllama.llama import llama_cpp
    except ImportError as error:
        raise OutpaceError("GGUF models need llama.cpp: pip install 'outpace[gguf]'") from error
    llama_cpp.disable_logging()
    return llama_cpp
