"""A toy model, for the tests of plugins too.

`ToyLM` has no KV cache and computes every node from scratch. This is slow, but a node never attends to a wrong token. A
draft model that shares some of its weights agrees with it on some tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor, nn

from outpace.core.lm import LM, Reference
from outpace.core.tree import Tree
from outpace.models.cacheless import CachelessLM
from outpace.models.early_exit import EarlyExitLM
from outpace.models.embeddings import Embeddings
from outpace.models.segment import Segment, SegmentOutput

VOCAB = 64


class ToyLM(CachelessLM):
    """Embeddings, attention layers and a head with random weights; models with one seed share their first layers."""

    def __init__(self, layers: int = 2, seed: int = 0, vocab: int = VOCAB, max_length: int = 4096):
        super().__init__()
        self.vocab, self.max_length = vocab, max_length
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5

        self.embed = weights(vocab, 16) * vocab**0.5
        self.position = weights(64, 16) * 2
        self.head = weights(16, vocab) * 3
        self.qkvo = [weights(16, 64) for _ in range(layers)]
        self.identity = f"toy of {layers} layers and {vocab} tokens"
        self.layers = ToyLayers(self)
        self.states = ToyStates(self)
        self.weights = ToyWeights(self)

    def run(
        self, tokens: list[int], positions: Seq[int] = (), mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits and hidden states of every position; the default positions and mask are of plain text."""
        n = len(tokens)  # [tokens, vocab], layers + 1 of [tokens, 16]
        places = torch.tensor(positions or range(n), dtype=torch.long)
        x = self.embed[tokens] + self.position[places % len(self.position)]
        mask = torch.ones(n, n, dtype=torch.bool).tril() if mask is None else mask
        states = [x]
        for w in self.qkvo:
            q, k, v, o = (nn.functional.layer_norm(x, (16,)) @ w).chunk(4, dim=-1)
            weights = (q @ k.T / 4).masked_fill(~mask, -torch.inf).softmax(-1)
            x = x + (weights @ v) * o.sigmoid()
            states.append(x)
        return nn.functional.layer_norm(x, (16,)) @ self.head, states

    def forward(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        return [self._forward(segment, taps) for segment in segments]

    def _forward(self, segment: Segment, taps: tuple[int, ...]) -> SegmentOutput:
        slot, layout = self.slots[segment.slot], segment.layout
        held = (slot.tokens + slot.pending)[: segment.start] + segment.pending
        if layout is not None and not isinstance(layout, Tree):
            return self._forward_layout(segment, held)
        paths = [held[: segment.start + i + 1] for i in range(len(segment.pending))]
        if isinstance(layout, Tree):
            nodes = range(segment.since, len(layout))
            paths += [held + [layout.tokens[n] for n in layout.path(node)] for node in nodes]
        ran = [self.run(path) for path in paths]
        logits = [logits[-1] for logits, _ in ran[len(segment.pending) :]]
        hidden = {tap: torch.stack([states[tap][-1] for _, states in ran]) for tap in taps}
        return SegmentOutput(torch.stack(logits) if logits else None, hidden)

    def _forward_layout(self, segment: Segment, held: list[int]) -> SegmentOutput:
        """Run a layout whose tokens may attend to later tokens: one pass over all of it, with its own mask."""
        layout = segment.layout
        assert layout is not None and not segment.since
        first, count = len(held), len(layout)
        mask = torch.ones(first + count, first + count, dtype=torch.bool).tril()
        mask[first:, first:] = layout.visible()
        logits, _ = self.run(held + layout.tokens, [*range(first), *layout.positions(first)], mask)
        return SegmentOutput(logits[first:], {})

    def native(self, tokens: list[int], count: int) -> Tensor:
        return self.run(tokens)[0][-count:]

    precise = native

    def reference(self) -> Reference:
        return self


class ToyLayers:
    """The layers of a toy model, any of which can be skipped."""

    def __init__(self, lm: ToyLM):
        self.lm, self.count = lm, len(lm.qkvo)

    def slice(self, layers: Seq[int], compile: bool = True) -> ToyLM:
        part = copy.copy(self.lm)
        part.slots, part.qkvo = [], [self.lm.qkvo[i] for i in layers]
        part.layers, part.states, part.weights = ToyLayers(part), ToyStates(part), ToyWeights(part)
        return part

    def early_exit(self, count: int) -> LM | None:
        return EarlyExitLM(self.lm, count, self._first_layers)

    def _first_layers(self, segments: Seq[Segment], count: int) -> list[SegmentOutput]:
        part = self.slice(range(count))
        part.slots = self.lm.slots
        return part.forward(segments, (count,))

    def cost_share(self, count: int) -> float:
        return count / self.count

    def reference(self, layers: Seq[int]) -> Reference:
        return self.slice(layers)


class ToyStates:
    """The hidden states of a toy model."""

    captures = False

    def __init__(self, lm: ToyLM):
        self.lm = lm
        self.embeddings: Embeddings | None = Embeddings(lm.embed, lm.head.T)

    def read(self, slot: int, first: int = 0) -> Tensor | None:  # [tokens - first, taps]
        return self.lm.slots[slot].hidden.since(first)

    def attach(self, head: Any) -> LM:
        from outpace.models.hf.head_lm import HeadLM

        return HeadLM.of_head(head)

    def prepare_head(self, head: Any) -> Any:
        return head


class ToyWeights:
    """The weights of a toy model."""

    def __init__(self, lm: ToyLM):
        self.lm, self.version = lm, 0

    def changed(self) -> None:
        self.lm.clear()
        self.version += 1

    def memory(self, tokens: int, requests: int = 1) -> None:
        return None


class ByteTokenizer:
    """A tokenizer of UTF-8 bytes and a stop token, with the Transformers tokenizer methods that Outpace calls."""

    eos_token_id = 256
    chat_template = None

    def __len__(self) -> int:
        return 257

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Seq[int], skip_special_tokens: bool = False) -> str:
        return bytes(t for t in tokens if t < 256).decode(errors="replace")
