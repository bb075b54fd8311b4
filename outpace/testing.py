"""A float64 toy transformer, a byte tokenizer and a batch of requests: what every test of the loop runs on.

`ToyLM` has no cache: it computes every node from scratch. So it is slow, it cannot be wrong about what a node sees, and
a draft that shares its weights in part agrees with it in part.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq

import torch
from torch import Tensor, nn

from outpace.core.lm import LM, Embeddings
from outpace.models.cacheless import CachelessLM
from outpace.models.early_exit import EarlyLM
from outpace.models.segment import Segment, SegmentOutput

VOCAB = 64


class ToyLM(CachelessLM):
    """Embeddings, attention layers and a head at random weights; one with fewer layers shares those it has by seed."""

    def __init__(self, layers: int = 2, seed: int = 0, vocab: int = VOCAB, context: int = 4096):
        super().__init__()
        self.vocab, self.context, self.stack = vocab, context, layers
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5

        self.embed = weights(vocab, 16) * vocab**0.5
        self.position = weights(64, 16) * 2
        self.head = weights(16, vocab) * 3
        self.qkvo = [weights(16, 64) for _ in range(layers)]
        self.ends = Embeddings(self.embed, self.head.T)

    def slice(self, layers: Seq[int], eager: bool = False) -> ToyLM:
        part = copy.copy(self)
        part.rows, part.stack, part.qkvo = [], len(layers), [self.qkvo[i] for i in layers]
        return part

    trial = slice

    def early(self, layers: int) -> LM | None:
        return EarlyLM(self, layers)

    def begin(self, jobs: Seq[Segment], layers: int) -> list[SegmentOutput]:
        part = self.slice(range(layers))
        part.rows = self.rows
        return part.forward(jobs, (layers,))

    def run(self, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
        """Logits and hidden states of every position."""  # [tokens, vocab], layers + 1 of [tokens, 16]
        n = len(tokens)
        x = self.embed[tokens] + self.position[torch.arange(n) % len(self.position)]
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        states = [x]
        for w in self.qkvo:
            q, k, v, o = (nn.functional.layer_norm(x, (16,)) @ w).chunk(4, dim=-1)
            weights = (q @ k.T / 4).masked_fill(~mask, -torch.inf).softmax(-1)
            x = x + (weights @ v) * o.sigmoid()
            states.append(x)
        return nn.functional.layer_norm(x, (16,)) @ self.head, states

    def forward(self, jobs: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        return [self._forward(job, taps) for job in jobs]

    def _forward(self, job: Segment, taps: tuple[int, ...]) -> SegmentOutput:
        row = self.rows[job.row]
        held = (row.tokens + row.pending)[: job.start] + job.pending
        paths = [held[: job.start + i + 1] for i in range(len(job.pending))]
        if job.tree is not None:
            nodes = range(job.since, len(job.tree))
            paths += [held + [job.tree.tokens[n] for n in job.tree.path(node)] for node in nodes]
        ran = [self.run(path) for path in paths]
        logits = [logits[-1] for logits, _ in ran[len(job.pending) :]]
        hidden = {tap: torch.stack([states[tap][-1] for _, states in ran]) for tap in taps}
        return SegmentOutput(torch.stack(logits) if logits else None, hidden)

    def native(self, tokens: list[int], count: int) -> Tensor:
        return self.run(tokens)[0][-count:]

    precise = native

    def reference(self) -> ToyLM:
        return self


class ByteTokenizer:
    """Text as UTF-8 bytes, with a stop token; has the methods of a Transformers tokenizer that Outpace calls."""

    eos_token_id = 256
    chat_template = None

    def __len__(self) -> int:
        return 257

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Seq[int], skip_special_tokens: bool = False) -> str:
        return bytes(t for t in tokens if t < 256).decode(errors="replace")
