"""The network of a block drafter (DFlash): a few layers fill in the next tokens at once, as one block of masks.

The layers see the target's hidden states of the whole text, fused into one per token. These serve as keys and values
only, and are kept from pass to pass. Queries come from the block alone: the newest token, then masks, which all see
each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from outpace.heads.base import ChainStepOutput, HeadSpec, evenly
from outpace.heads.parallel import Parallel, Text, TextCache, TextInputs
from outpace.heads.recursive import layer_config
from outpace.models.cache.pool import CacheShape
from outpace.models.embeddings import Embeddings

LAYERS, STEPS = 3, 7  # defaults of a head
ANCHORS = 128  # positions of a training text where blocks start
# Attention backends that plan nothing per shape: the text grows with every pass, and cuDNN would plan again each time.
UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
Attend = Callable[[Tensor, Tensor], Tensor]  # queries, the block's own keys and values -> [..., heads, tokens, dim]


class Rotations(NamedTuple):
    """The rotary embeddings of some positions."""

    cos: Tensor  # [..., tokens, dim]
    sin: Tensor

    def rotate(self, x: Tensor) -> Tensor:  # [..., heads, tokens, dim]
        return x * self.cos.unsqueeze(-3) + rotate_half(x) * self.sin.unsqueeze(-3)


class BlockLayer(nn.Module):
    """A Llama layer that gets its attention as an argument, because its block also sees a context."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        hidden, eps, self.dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        self.kv_heads = config.num_key_value_heads
        own, shared = config.num_attention_heads * self.dim, self.kv_heads * self.dim
        self.q_proj, self.o_proj = nn.Linear(hidden, own, bias=False), nn.Linear(own, hidden, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(hidden, shared, bias=False) for _ in range(2))
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.post_attention_layernorm = (LlamaRMSNorm(hidden, eps) for _ in range(2))

    def keys_values(self, states: Tensor, rotations: Rotations) -> Tensor:
        """Return keys and values."""  # [..., tokens, hidden] -> [2, ..., kv heads, tokens, dim]
        return torch.stack([rotations.rotate(self._heads(self.k_proj(states))), self._heads(self.v_proj(states))])

    def _heads(self, x: Tensor) -> Tensor:  # [..., tokens, heads * dim] -> [..., heads, tokens, dim]
        return x.unflatten(-1, (-1, self.dim)).transpose(-2, -3)

    def forward(self, states: Tensor, rotations: Rotations, attend: Attend) -> Tensor:  # [..., tokens, hidden]
        normed = self.input_layernorm(states)
        attended = attend(rotations.rotate(self._heads(self.q_proj(normed))), self.keys_values(normed, rotations))
        states = states + self.o_proj(attended.transpose(-2, -3).flatten(-2))
        return states + self.mlp(self.post_attention_layernorm(states))


class Context:
    """Keys and values of a text in all layers, followed by room for a block, which the next block overwrites."""

    def __init__(self) -> None:
        self.keys_values: list[Tensor] = []  # of each layer, [2, kv heads, room, dim]
        self.length = 0

    def write(self, layer: int, new: Tensor, spare: int) -> None:  # [2, kv heads, tokens, dim]
        end = self.length + new.shape[2]
        if layer == len(self.keys_values):
            self.keys_values.append(new.new_zeros(2, new.shape[1], 2 * end + spare, new.shape[3]))
        if self.keys_values[layer].shape[2] < end + spare:
            larger = new.new_zeros(2, new.shape[1], 2 * end + spare, new.shape[3])
            larger[:, :, : self.length] = self.keys_values[layer][:, :, : self.length]
            self.keys_values[layer] = larger
        self.keys_values[layer][:, :, self.length : end] = new

    def with_block(self, layer: int, end: int, block: Tensor) -> Tensor:  # [2, kv heads, slots, dim]
        self.keys_values[layer][:, :, end : end + block.shape[2]] = block
        return self.keys_values[layer][:, :, : end + block.shape[2]]


class TextContexts:
    """The contexts of several texts. Each block attends alone, to the context of its own text in place, so texts of
    different lengths are neither padded nor copied."""

    def __init__(self, contexts: list[Context], counts: list[int], size: int):
        self.contexts, self.counts, self.size = contexts, counts, size  # counts: states of each that are read now

    def write(self, layer: int, keys_values: Tensor) -> None:  # [2, kv heads, states, dim]
        for context, new in zip(self.contexts, keys_values.split(self.counts, dim=2), strict=True):
            context.write(layer, new, self.size)

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """Attend, text by text."""  # [heads, texts * size, dim], [2, kv heads, texts * size, dim]
        out, blocks = [], zip(queries.split(self.size, -2), keys_values.split(self.size, -2), strict=True)
        with sdpa_kernel(UNPLANNED):
            for context, count, (q, own) in zip(self.contexts, self.counts, blocks, strict=True):
                keys, values = context.with_block(layer, context.length + count, own)
                out.append(_attend(q[None], keys[None], values[None], None)[0])
        return torch.cat(out, dim=-2)


class BlockHead(Parallel):
    """Several layers over the fused states of the text and a block of masks."""

    kind: ClassVar[str] = "block"
    anchors = ANCHORS
    layers: Seq[BlockLayer]

    def __init__(self, embeddings: Embeddings, spec: HeadSpec, ids: Tensor | None = None):
        super().__init__(embeddings, spec, ids)
        config = layer_config(embeddings, spec)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.mask = nn.Parameter(embeddings.embed.float().mean(0))
        self.fc, self.fc_norm = nn.Linear(len(spec.taps) * hidden, hidden, bias=False), LlamaRMSNorm(hidden, eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(spec.layers))  # type: ignore[assignment]
        self.norm = LlamaRMSNorm(hidden, eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    @classmethod
    def defaults(cls, layer_count: int, given: dict[str, Any]) -> dict[str, Any]:
        """Tap as many states as layers, evenly from the first layer's output to the input of the last three layers."""
        layers = given.get("layers", LAYERS)
        return {"layers": layers, "steps": STEPS, "taps": evenly(min(1, layer_count), layer_count - 3, layers)}

    @property
    def size(self) -> int:
        """The number of tokens of a block."""
        return self.spec.steps + 1

    def _rotations(self, positions: Tensor) -> Rotations:  # [..., tokens]
        rows = positions if positions.dim() > 1 else positions[None]
        found = Rotations(*self.rotary_emb(self.mask, rows))
        return found if positions.dim() > 1 else Rotations(found.cos[0], found.sin[0])

    def _fused(self, hidden: Tensor) -> Tensor:  # [..., taps * hidden] -> [..., hidden]
        return self.fc_norm(self.fc(hidden.to(self.mask.dtype)))

    def _blocks(self, tokens: Tensor) -> Tensor:
        """Return the input embeddings of blocks that start with these tokens."""  # [...] -> [..., size, hidden]
        masks = self.mask.expand(*tokens.shape, self.spec.steps, -1)
        return torch.cat([self.embed(tokens).unsqueeze(-2), masks], dim=-2)

    def logits(self, states: Tensor) -> Tensor:
        return super().logits(self.norm(states))

    def pieces(self) -> list[nn.Module]:
        return [*super().pieces(), *([self.link] if self.link is not None else [])]

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(len(self.layers), self.layers[0].kv_heads, self.layers[0].dim, self.mask.dtype)

    def contexts(self, texts: Seq[Text]) -> tuple[TextContexts, list[int]]:
        contexts = [text.cached.setdefault("context", Context()) for text in texts]
        ends = [len(text.hidden) for text in texts if text.hidden is not None]
        firsts = [context.length for context in contexts]
        return TextContexts(contexts, [end - first for end, first in zip(ends, firsts, strict=True)], self.size), firsts

    def slots(self, texts: Seq[Text], count: int) -> Tensor:
        found = super().slots(texts, count)
        for text in texts:
            assert text.hidden is not None
            text.cached["context"].length = len(text.hidden)
        return found

    def read(self, hidden: Tensor, positions: Tensor, cache: TextCache) -> None:
        fused, rotations = self._fused(hidden), self._rotations(positions)
        for index, layer in enumerate(self.layers):
            cache.write(index, layer.keys_values(fused, rotations))

    def fill(self, inputs: TextInputs, cache: TextCache | None, count: int) -> Tensor:
        assert cache is not None, "a block attends to its text"
        self.read(inputs.hidden, inputs.positions, cache)
        states = self._blocks(inputs.tokens).flatten(0, 1)  # [texts * size, hidden]
        places = inputs.starts[:, None] + torch.arange(self.size, device=states.device)
        rotations = self._rotations(places.flatten())
        for index, layer in enumerate(self.layers):
            states = layer(states, rotations, partial(cache.attend, index))
        return states.unflatten(0, (-1, self.size))[:, 1 : 1 + count]

    def unroll(self, tokens: Tensor, hidden: Tensor, steps: int, starts: Tensor | None = None) -> list[ChainStepOutput]:
        """Draft blocks at some columns, drawn at random each time, or at all columns if there are few."""
        self.check(steps)
        columns = self._columns(tokens, starts)  # [batch, blocks]
        device, size = tokens.device, self.size
        fused, newest = self._fused(hidden), tokens.gather(1, columns + 1)
        places = (columns + 1)[..., None] + torch.arange(size, device=device)  # [batch, blocks, size]
        far, near = (
            self._rotations(torch.arange(tokens.shape[1], device=device)[None]),
            self._rotations(places.flatten(1)),
        )
        mask = _seen(columns, tokens.shape[1], size)
        states = self._blocks(newest).flatten(1, 2)  # [batch, blocks * size, hidden]
        for layer in self.layers:
            context = layer.keys_values(fused, far)

            def attend(queries: Tensor, keys_values: Tensor, context: Tensor = context) -> Tensor:
                keys, values = torch.cat([context, keys_values], dim=-2)
                return _attend(queries, keys, values, mask)

            states = layer(states, near, attend)
        slots = states.unflatten(1, (-1, size))[:, :, 1 : 1 + steps].unbind(2)
        return self.step_outputs(tokens, columns, slots)

    def _columns(self, tokens: Tensor, starts: Tensor | None) -> Tensor:  # [batch, tokens] -> [batch, blocks]
        batch, count = tokens.shape[0], tokens.shape[1] - 1
        if count <= self.anchors:
            return torch.arange(count, device=tokens.device).expand(batch, -1)
        drawn = torch.rand(batch, count, device=tokens.device)
        if starts is not None:
            drawn = drawn + starts[:, 1:]
        return drawn.topk(self.anchors).indices.sort(-1).values


def _seen(columns: Tensor, length: int, size: int) -> Tensor:
    """Mask: a block sees the states up to its column, and itself."""  # [batch, blocks] -> [batch, 1, queries, keys]
    before = torch.arange(length, device=columns.device) <= columns[..., None]  # [batch, blocks, length]
    count = columns.shape[1]
    own = torch.eye(count, dtype=torch.bool, device=columns.device).expand(len(columns), -1, -1)
    rows = torch.cat([before, own.repeat_interleave(size, dim=2)], dim=2)
    return rows.repeat_interleave(size, dim=1)[:, None]


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attend, with groups of heads that share keys."""  # [batch, heads, queries, dim], [batch, kv heads, keys, dim]
    shared = queries.shape[1] != keys.shape[1]
    return nn.functional.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=shared)
