"""Training batches: records of similar length, as many as a token budget holds with padding."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outpace.errors import UsageError
from outpace.train.data.records import TextRecord

POOL = 1024  # records that are sorted by length together, after shuffling: each epoch groups different records
WIDTHS = 32  # number of padded widths, evenly spaced up to the longest text


class Batch(NamedTuple):
    """A batch of texts, padded on the right with zeros."""

    tokens: Tensor  # [batch, tokens], int64
    mask: Tensor  # [batch, tokens], bool: the token belongs to an answer
    lengths: Tensor  # [batch]: tokens of each text, without padding

    def to(self, device: str | torch.device) -> Batch:
        return Batch(*(tensor.to(device) for tensor in self))

    def filled(self, budget: int, length: int) -> Batch:
        """Pad to one of a few shapes: GPU libraries plan again for each new shape, which takes longer than a step."""
        rows, width = self.tokens.shape
        wide = _rounded(width, length)
        below, beside = max(budget // wide - rows, 0), wide - width
        tokens, mask = (nn.functional.pad(tensor, (0, beside, 0, below)) for tensor in self[:2])
        return Batch(tokens, mask, nn.functional.pad(self.lengths, (0, below)))


def _rounded(size: int, length: int) -> int:
    step = max(1, length // WIDTHS)
    return -(-size // step) * step


def batches(
    records: Seq[TextRecord], tokens_per_batch: int, length: int, seed: int = 0, epoch: int = 0
) -> Iterator[Batch]:
    """Yield all records once, in an order that depends only on seed and epoch; texts are cut off at `length`."""
    for chosen in plan(records, tokens_per_batch, length, seed, epoch):
        yield collate([records[i] for i in chosen], length)


def plan(
    records: Seq[TextRecord], tokens_per_batch: int, length: int, seed: int = 0, epoch: int = 0
) -> list[list[int]]:
    """Return the record indices of each batch. A record whose answer begins beyond `length` is left out."""
    if length < 2:
        raise UsageError(f"length={length} is too short to train on: use at least 2")
    if tokens_per_batch < length:
        raise UsageError(
            f"a batch of {tokens_per_batch} tokens cannot hold a text of {length}: raise the batch, or lower the length"
        )
    usable = [i for i, record in enumerate(records) if record.prompt < min(len(record.tokens), length)]
    if not usable:
        raise UsageError(f"no answer begins within {length} tokens: raise the length, or use other data")
    draw = random.Random(f"{seed}/{epoch}")
    draw.shuffle(usable)
    found: list[list[int]] = []
    for start in range(0, len(usable), POOL):
        pool = sorted(usable[start : start + POOL], key=lambda i: min(len(records[i].tokens), length))
        sizes = [_rounded(min(len(records[i].tokens), length), length) for i in pool]
        found += _cut(pool, sizes, tokens_per_batch)
    draw.shuffle(found)
    return found


def _cut(pool: Seq[int], lengths: Seq[int], budget: int) -> Iterator[list[int]]:
    """Split a pool that is sorted by length into batches within the budget, padding counted."""
    batch: list[int] = []
    for index, size in zip(pool, lengths, strict=True):
        if batch and (len(batch) + 1) * size > budget:
            yield batch
            batch = []
        batch.append(index)
    yield batch


def collate(records: Seq[TextRecord], length: int) -> Batch:
    """Pad these records into one batch."""
    lengths = torch.tensor([min(len(record.tokens), length) for record in records])
    tokens = torch.zeros(len(records), int(lengths.max()), dtype=torch.long)
    for row, record in zip(tokens, records, strict=True):
        cut = record.tokens[:length]
        row[: len(cut)] = cut
    positions = torch.arange(tokens.shape[1])
    starts = torch.tensor([record.prompt for record in records])
    return Batch(tokens, (positions >= starts[:, None]) & (positions < lengths[:, None]), lengths)
