"""Runtime: llama.cpp through its binding: a cache of cells, sequences that share them, and passes over them.

What a token says must not depend on how many others are scored with it, or answers would differ with and without
speculation. With llama.cpp's default settings it does. With flash attention over keys in q8_0 and values in float16 it
does not, and is as fast: so that is what we use. Only weights of 16 and 32 bits are still multiplied in another way for
one token than for several, and a token of such a model never comes alone; and weights that llama.cpp has put in another
order, in another way for four and more, which then come in several calls (docs/guide/gguf.md).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outpace.errors import OutpaceError, UnsupportedModel
from outpace.models.gguf.raw_logits import RawLogits

BATCH, PART = 2048, 512  # most tokens of a pass, and of what llama.cpp computes of it at a time
FEW = 3  # tokens of a call that reordered weights are multiplied with one by one
SEQUENCES = 256  # as many as llama.cpp tells apart
COMPANY = SEQUENCES - 1  # the last one: of tokens that are there so that another one is not alone
PROBE = tuple(range(1, 9))  # tokens
LEAST = 256  # cells; llama.cpp has no cache that is smaller
FLASH = 1  # as llama.cpp numbers switches of attention


class CacheNumbers(NamedTuple):
    """A kind of numbers in a cache."""

    kind: int  # as llama.cpp numbers them
    size: float  # bytes of one
    block: int  # numbers that are only kept together


F16, Q8_0, BF16 = CacheNumbers(1, 2.0, 1), CacheNumbers(8, 34 / 32, 32), CacheNumbers(30, 2.0, 1)


class BatchEntry(NamedTuple):
    """A token of a pass."""

    token: int
    position: int
    sequences: list[int]  # that it is part of, and so sees
    wanted: bool = False  # whether it has a say


class EntryOutput(NamedTuple):
    """What a call said behind one of its entries."""

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
        """`offload`: to a GPU, where this build of llama.cpp has one; None: if it has. `together`: weights in the
        order that llama.cpp likes on this processor, as without `bitwise`, but in calls of at most so many tokens.
        `paired`: whether no token may come alone, where that is known; None: it is tried."""
        library = _library()
        if not path.is_file():
            raise OutpaceError(f"there is no file {str(path)!r}")
        if offload and not library.llama_supports_gpu_offload():
            raise OutpaceError(
                "this build of llama.cpp runs on a CPU only: install one for your GPU, or leave device out"
            )

        class Model(library.LlamaModel):  # type: ignore[misc, name-defined]
            @property
            def n_vocab(self) -> int:  # which its own contexts ask it for
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
            raise UnsupportedModel(f"{path.name} is no model that continues a text")
        if self.model.is_recurrent() or self.model.is_hybrid():
            raise UnsupportedModel(
                f"{path.name} keeps a recurrent state, which llama.cpp cannot take back: run it as a Transformers model"
            )
        self.together = together or BATCH  # most tokens of a call
        self.paired = bool(paired)
        if bitwise and paired is None:
            self.paired = self._alone_is_different()

    def _alone_is_different(self) -> bool:
        """Whether tokens say something else one by one than all at once."""
        entries, said = [BatchEntry(token, i, [0], True) for i, token in enumerate(PROBE)], list[Tensor]()
        for passes in ([entries], [[entry] for entry in entries]):
            runtime = Runtime(self, LEAST)
            for one in passes:
                runtime.decode(one)
                said += [runtime.logits(i) for i in range(len(one))]
        together, alone = said[: len(PROBE)], said[len(PROBE) :]
        return not all(map(torch.equal, together, alone))

    @property
    def vocab(self) -> int:
        return self.tokens.n_vocab

    @property
    def largest_pass(self) -> int:
        """Tokens of a pass; where none may come alone, not more than are computed together."""
        return PART - 1 if self.paired else BATCH

    @property
    def token_bytes(self) -> int:
        """Of the cache, for one token."""
        model = self.model
        return int(model.n_layer * self._head * model.n_head_kv * (self.keys.size + F16.size))

    @property
    def keys(self) -> CacheNumbers:
        """In bfloat16 for heads whose numbers do not come in blocks."""
        return BF16 if self._head % Q8_0.block else Q8_0

    @property
    def _head(self) -> int:
        """Numbers of a key."""
        said = self.said(f"{self.said('general.architecture')}.attention.key_length")
        return int(said) if said else self.model.n_embd // self.model.n_head

    def said(self, key: str) -> str | None:
        """What the file says of itself."""
        try:
            return self.model.meta_val_str(key) or None
        except (KeyError, ValueError, RuntimeError):
            return None


class Runtime:
    """A cache of so many cells, and passes over it. Cells are taken in order, as long as none before them is free."""

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
        self._rows: dict[int, int] = {}  # by entry of the last call: its place among those whose logits were wanted
        self._first = 0  # entry of the last call
        self._said: dict[int, EntryOutput] = {}  # by those before it

    def decode(self, entries: Seq[BatchEntry]) -> None:
        """A pass: a call, or several, where too many would say something else together."""
        self.passes += 1
        self._said, calls = {}, range(0, len(entries), self._together)
        for first in calls:
            part = entries[first : first + self._together]
            self._call(part)
            self._first = first
            if first != calls[-1]:  # the next call forgets what this one says
                said = {
                    first + i: EntryOutput(self._logits(i), self._likeliest(i)) for i, e in enumerate(part) if e.wanted
                }
                self._said |= said

    def _call(self, entries: Seq[BatchEntry]) -> None:
        self._batch.clear()
        wanted = [i for i, entry in enumerate(entries) if entry.wanted]
        self._rows = {entry: row for row, entry in enumerate(wanted)}
        for entry in entries:
            self._batch.add(*entry)
        if self._paired and (len(entries) == 1 or sum(entry.wanted for entry in entries) == 1):
            self._batch.add(entries[0].token, 0, [COMPANY], True)
            self._context.decode(self._batch)
            self.remove(COMPANY, 0)
        else:
            self._context.decode(self._batch)

    def logits(self, index: int) -> Tensor:  # [vocab]
        """What the pass said behind one of its entries."""
        return self._said[index].logits if index < self._first else self._logits(index - self._first)

    def greedy(self, index: int) -> int:
        """The likeliest token there, found without handing all of them over."""
        return self._said[index].likeliest if index < self._first else self._likeliest(index - self._first)

    def _logits(self, index: int) -> Tensor:  # [vocab]
        return self._raw.row(index, self._rows[index])

    def _likeliest(self, index: int) -> int:
        found = self._raw.likeliest(index, self._rows[index])
        return self._greedy.sample(self._context, index) if found is None else found

    def share(self, source: int, target: int, first: int, end: int) -> None:
        """Make the tokens of a sequence at these positions part of another one, too."""
        self._context.memory_seq_cp(source, target, first, end)

    def remove(self, sequence: int, first: int) -> None:
        """Take the tokens from this position on out of a sequence; cells of none are free."""
        self._context.memory_seq_rm(sequence, first, -1)

    def clear(self) -> None:
        self._context.kv_cache_clear()


def identity(path: Path) -> str:
    """What tells a file from others, without reading it."""
    at = path.stat()
    return f"{path.name}, {at.st_size} bytes, {at.st_mtime_ns}"


def _library() -> Any:
    try:
        from cyllama.llama import llama_cpp
    except ImportError as error:
        raise OutpaceError("GGUF models need llama.cpp: pip install 'outpace[gguf]'") from error
    llama_cpp.disable_logging()
    return llama_cpp
