"""LlamaLM: a GGUF model behind the loop.

A row is a sequence of llama.cpp's, and so is every further branch of a tree: a node is part of the sequences of all
branches below it. What a node says depends on the order in which what it sees lies in the cache, by its last bits; so
cells are taken in the order of the text, and a cell that is given up before others stays taken until the cache is full.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from outpace.core.lm import MemoryNeed, Picked, Reference
from outpace.core.tree import ROOT
from outpace.errors import CacheFull, UnsupportedModel, UsageError
from outpace.models.gguf.runtime import COMPANY, LEAST, BatchEntry, File, Runtime
from outpace.models.memory import free
from outpace.models.segment import Segment, SegmentOutput
from outpace.models.slots import SlotLM

ROWS = 64  # the first sequences are rows
UNREAD = COMPANY - 1  # holds what was given up; those between are for branches
CELLS = 4096  # of a new cache


class Rows:
    """Logits that are fetched when they are looked at, which takes a while: as a tensor, as far as anybody asks."""

    is_cuda = False

    def __init__(self, runtime: Runtime, places: list[int]):
        self._runtime, self._places, self._pass = runtime, places, runtime.passes
        self._known: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Tensor:
        if not isinstance(index, int):
            return self._whole[index]
        index %= len(self._places)
        if index not in self._known:
            assert self._pass == self._runtime.passes, "logits are looked at before the next pass"
            self._known[index] = self._runtime.logits(self._places[index])
        return self._known[index]

    @cached_property
    def _whole(self) -> Tensor:  # [nodes, vocab]
        return torch.stack([self[i] for i in range(len(self))])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, given: tuple[Any, ...], named: Any = None) -> Any:
        return function(*(one._whole if isinstance(one, cls) else one for one in given), **(named or {}))


class LazyPicks(Seq[int]):
    """The likeliest token of each node, found when it is asked for: below a guess that was wrong nobody asks."""

    def __init__(self, runtime: Runtime, places: list[int]):
        self._runtime, self._places, self._pass = runtime, places, runtime.passes

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        assert self._pass == self._runtime.passes, "choices are looked at before the next pass"
        return self._runtime.greedy(self._places[index])


@dataclass
class CachedSlot:
    """What a row has in the cache."""

    cells: list[int] = field(default_factory=list)  # of its tokens
    nodes: list[int] = field(default_factory=list)  # of the nodes of its tree
    sequences: list[int] = field(default_factory=list)  # of each node: one that it is part of
    ends: dict[int, int] = field(default_factory=dict)  # the last node of each of them

    def forget_tree(self) -> None:
        self.nodes, self.sequences, self.ends = [], [], {}


class LlamaLM(SlotLM):
    """A model that llama.cpp runs."""

    handy = False

    def __init__(self, file: File, cache_limit: int | None = None):
        super().__init__()
        self.file, self.vocab = file, file.vocab
        self.context: int = file.model.n_ctx_train
        room = cache_limit if cache_limit is not None else free(torch.device("cpu")) // 2
        self.most = room // file.token_bytes  # cells
        if self.most < LEAST:
            raise UsageError(
                f"a cache of {room} bytes holds {self.most} tokens of this model, and {LEAST} are the least"
            )
        self.runtime = Runtime(file, min(CELLS, self.most))
        self.held: list[CachedSlot] = []
        self.end = 0  # cells that are taken
        self._branches = list(range(ROWS, UNREAD))

    @property
    def fingerprint(self) -> str:
        model, together = self.file.model, self.file.together
        return f"{model.desc}, {model.size} bytes, {torch.get_num_threads()} threads, calls of {together}"

    def memory(self, tokens: int) -> MemoryNeed:
        return MemoryNeed(self.file.model.size, self.file.token_bytes, tokens, self.most * self.file.token_bytes)

    def reference(self) -> Reference:
        return LlamaReference(self.file)

    def acquire(self, tokens: list[int], taps: tuple[int, ...] = ()) -> int:
        if taps:
            raise UnsupportedModel("this method reads hidden states, and llama.cpp hands none out")
        if len([row for row in self.rows if row.busy]) >= ROWS:
            raise UsageError(f"a GGUF model answers at most {ROWS} requests at a time")
        row = super().acquire(tokens, taps)
        self.held += [CachedSlot() for _ in range(row + 1 - len(self.held))]
        return row

    def release(self, row: int) -> None:
        if self.rows[row].tree is not None:
            self.commit(row, [])
        super().release(row)

    def reserve(self, jobs: Seq[Segment]) -> None:
        need = sum(len(job.tokens) for job in jobs)
        if need > self.file.largest_pass and any(job.tree is not None for job in jobs):  # a prompt goes in parts
            raise CacheFull(f"{need} tokens are more than the {self.file.largest_pass} of a pass", jobs[-1].row)
        need += self.file.paired  # company takes a cell as well
        if self.end + need <= self.runtime.cells:
            return
        busy = [i for i, row in enumerate(self.rows) if row.busy]
        wanted = need + sum(len(self.rows[i].tokens) for i in busy)
        if wanted > self.most or any(job.since for job in jobs):
            raise CacheFull(f"{wanted} tokens do not fit into a cache of {self.most}", jobs[-1].row)
        self._renew(busy, wanted)

    def _renew(self, busy: list[int], wanted: int) -> None:
        """A cache without what was given up, larger if need be; what idle rows held goes."""
        size = self.runtime.cells
        while size < min(2 * wanted, self.most):
            size *= 2
        self._empty(min(size, self.most))
        for index, row in enumerate(self.rows):
            self.held[index] = CachedSlot()
            row.forget_tree()
            if index not in busy:
                row.tokens = []
            for first in range(0, len(row.tokens), self.chunk):
                self._decode([Segment(index, first, row.tokens[first : first + self.chunk])])

    def _empty(self, cells: int) -> None:
        if cells == self.runtime.cells:
            self.runtime.clear()
        else:
            self.runtime = Runtime(self.file, cells)
        self.end, self._branches = 0, list(range(ROWS, UNREAD))

    def forward(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        try:
            firsts = self._decode(jobs)
        except BaseException:  # some of it may have been written: no row can be trusted
            self._empty(self.runtime.cells)
            for index, row in enumerate(self.rows):
                row.pending, row.tokens, self.held[index] = row.tokens + row.pending, [], CachedSlot()
                row.forget_tree()
            raise
        return [self._output(job, first + len(job.pending)) for job, first in zip(jobs, firsts, strict=True)]

    def _output(self, job: Segment, first: int) -> SegmentOutput:
        if job.tree is None:
            return SegmentOutput(None, {})
        places = list(range(first, first + len(job.tree) - job.since))
        rows = Rows(self.runtime, places)
        pick = job.pick
        if pick is None or pick.temperature or pick.filters:
            return SegmentOutput(rows[:], {})
        # How large the largest logit is would have to be looked up: so one that is not finite goes unnoticed here.
        chosen = Picked(LazyPicks(self.runtime, places), [0.0] * len(places), [1.0] * len(places))
        return SegmentOutput(cast(Tensor, rows), {}, chosen)

    def _decode(self, jobs: Seq[Segment]) -> list[int]:
        """Run a pass; where in it each job begins."""
        entries: list[BatchEntry] = []
        firsts = []
        for job in jobs:
            firsts.append(len(entries))
            entries += self._entries(job)
        self.runtime.decode(entries)
        for job, first in zip(jobs, firsts, strict=True):
            cells, fed = [self.end + first + i for i in range(len(job.tokens))], len(job.pending)
            self.held[job.row].cells += cells[:fed]
            self.held[job.row].nodes += cells[fed:]
        self.end += len(entries)
        return firsts

    def _entries(self, job: Segment) -> list[BatchEntry]:
        held, tree = self.held[job.row], job.tree
        entries = [BatchEntry(token, job.start + i, [job.row]) for i, token in enumerate(job.pending)]
        if tree is None:
            return entries
        if not job.since:
            held.forget_tree()
        for node in range(job.since, len(tree)):
            parent = tree.parents[node]
            sequence = held.sequences[parent] if parent >= ROOT else job.row
            if parent >= ROOT and held.ends[sequence] != parent:  # it has gone on to another child
                sequence = self._branch(job, parent, entries)
            held.sequences.append(sequence)
            held.ends[sequence] = node
            position = job.start + len(job.pending) + tree.depths[node]
            entries.append(BatchEntry(tree.tokens[node], position, [sequence], True))
        return entries

    def _branch(self, job: Segment, parent: int, entries: list[BatchEntry]) -> int:
        """A sequence that has been where this node is."""
        assert job.tree is not None
        if not self._branches:
            raise CacheFull(f"a tree has at most {UNREAD - ROWS} branches here", job.row)
        held, sequence, fed = self.held[job.row], self._branches.pop(), len(job.pending)
        path = job.tree.path(parent)
        before = [node for node in path if node < job.since]  # those are in the cache, with all that comes before them
        source = held.sequences[before[-1]] if before else job.row
        self.runtime.share(source, sequence, 0, job.start + (fed + len(before) if before else 0))
        for place in [*range(fed), *(fed + node - job.since for node in path if node >= job.since)]:
            entries[place].sequences.append(sequence)
        return sequence

    def commit(self, row: int, path: list[int]) -> None:
        held = self.held[row]
        if len(path) < len(held.nodes):
            self._drop(row, path)
        held.cells += [held.nodes[node] for node in path]
        held.forget_tree()

    def _drop(self, row: int, path: list[int]) -> None:
        """Give up the nodes that are not on this path; those on it become part of the row's own sequence."""
        held, first, kept = self.held[row], len(self.rows[row].tokens), set(path)
        depths = self._depths(row)
        gone = {cell: node for node, cell in enumerate(held.nodes) if node not in kept}
        end = self._tail(gone)
        for cell, node in gone.items():
            if cell < end:
                self.runtime.share(held.sequences[node], UNREAD, first + depths[node], first + depths[node] + 1)
        tip = held.sequences[path[-1]] if path else row
        same = sum(held.sequences[node] == row for node in path)
        self.runtime.remove(row, first + same)
        if tip != row:
            self.runtime.share(tip, row, first + same, first + len(path))
        for sequence in set(held.sequences) - {row}:
            self.runtime.remove(sequence, 0)
            self._branches.append(sequence)
        self.end = end

    def _depths(self, row: int) -> list[int]:
        tree = self.rows[row].tree
        assert tree is not None, "its nodes are in the cache"
        return tree.depths

    def _tail(self, gone: dict[int, int]) -> int:
        """Where the cells that are taken end without these."""
        end = self.end
        while end - 1 in gone:
            end -= 1
        return end

    def crop(self, row: int, length: int) -> int:
        if row >= len(self.held):
            return length
        held = self.held[row]
        shared = {cell for other in self.held if other is not held for cell in other.cells}
        gone = {cell: at for at, cell in enumerate(held.cells) if at >= length and cell not in shared}
        end = self._tail(gone)
        unread = [at for cell, at in gone.items() if cell < end]
        if unread:
            self.runtime.share(row, UNREAD, min(unread), max(unread) + 1)
        self.runtime.remove(row, length)
        held.cells = held.cells[:length]
        self.end = end
        if not any(other.cells or other.nodes for other in self.held):
            self._empty(self.runtime.cells)
        return length

    def copy(self, source: int, target: int, length: int) -> bool:
        self.held += [CachedSlot() for _ in range(max(source, target) + 1 - len(self.held))]
        self.crop(target, 0)
        self.runtime.share(source, target, 0, length)
        self.held[target].cells = self.held[source].cells[:length]
        return True


class LlamaReference:
    """One pass over a whole text in a cache of its own. llama.cpp has one precision."""

    def __init__(self, file: File):
        self.file = file

    def native(self, tokens: list[int], count: int) -> Tensor:
        runtime, found = Runtime(self.file, len(tokens) + 1), list[Tensor]()
        for first in range(0, len(tokens), self.file.largest_pass):
            part = tokens[first : first + self.file.largest_pass]
            wanted = [first + i >= len(tokens) - count for i in range(len(part))]
            entries = [BatchEntry(token, first + i, [0], wanted[i]) for i, token in enumerate(part)]
            runtime.decode(entries)
            found += [runtime.logits(i) for i, asked in enumerate(wanted) if asked]
        return torch.stack(found)

    def precise(self, tokens: list[int], count: int) -> Tensor:
        return self.native(tokens, count).double()
