"""Our attention function: a few queries with ancestor masks over long prefixes of different lengths.

It is registered once with Transformers' `AttentionInterface`. Everything it needs comes as the keyword argument
`attention_plan`, which the model's forward passes on; there is no global state.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from outpace.errors import UnsupportedModel
from outpace.models.hf.cache import SlotCache
from outpace.models.segment import Segment

NAME = "outpace"


@dataclass(frozen=True)
class AttentionRule:
    """How a layer turns query-key products into attention weights."""

    scaling: float
    softcap: float | None
    sinks: Tensor | None  # [heads]


class AttentionPlan(Protocol):
    """The plan that a pass gives to the attention function: it writes the new keys and values, and attends."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor: ...


class EagerAttention:
    """Attention of one eager pass; masks are built once and shared by all layers."""

    def __init__(
        self,
        cache: SlotCache,
        segments: Seq[Segment],
        windows: Seq[int | None],
        device: torch.device,
        alone: bool = False,
    ):
        self.alone = alone  # one query at a time, over its own path: the same arithmetic in every pass
        self.cache = cache
        self.segments = segments
        self.windows = windows  # of each layer
        self.device = device
        self.calls = 0  # layers that attended through this plan
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}  # over the keys from `_first_seen` on
        self._paths: dict[tuple[int, int | None], list[Tensor]] = {}

    def mask(self, index: int, window: int | None) -> Tensor | None:
        """Return the mask of segment `index`, or None if all its queries see all its keys."""  # [queries, keys]
        if (index, window) not in self._masks:
            mask = _mask(self.segments[index], window)
            self._masks[index, window] = None if bool(mask.all()) else mask.to(self.device)
        return self._masks[index, window]

    def paths(self, index: int, window: int | None) -> list[Tensor]:
        """Return the keys that each query of segment `index` sees, in text order."""  # queries of [keys]
        if (index, window) not in self._paths:
            mask = _mask(self.segments[index], window)
            self._paths[index, window] = [torch.nonzero(seen).flatten().to(self.device) for seen in mask]
        return self._paths[index, window]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """Write the new keys and values, then attend segment by segment."""  # out: [1, tokens, heads, head dim]
        layer: int = module.layer_idx  # type: ignore[assignment]
        self.cache.write(layer, key, value, self.segments)
        self.calls += 1
        out, at, window = [], 0, self.windows[layer]
        for index, segment in enumerate(self.segments):
            count = segment.count
            q = query[0, :, at : at + count]
            at += count
            keys, values = self.cache.read(layer, segment.slot, _first_seen(segment, window), segment.end)
            if not self.alone:
                out.append(_attend(q, keys, values, self.mask(index, window), rule))
                continue
            for i, path in enumerate(self.paths(index, window)):
                k, v = (side.index_select(1, path) for side in (keys, values))
                out.append(_attend(q[:, i : i + 1], k, v, None, rule))
        if at < query.shape[2]:  # padding tokens
            out.append(query.new_zeros(query.shape[1], query.shape[2] - at, value.shape[3]))
        return torch.cat(out, dim=1).transpose(0, 1)[None]


def _first_seen(segment: Segment, window: int | None) -> int:
    """Return the first key that a query of this segment can see."""
    return 0 if window is None else max(0, segment.start - window + 1)


def _mask(segment: Segment, window: int | None) -> Tensor:  # [queries, keys from `_first_seen` on]
    fed, first, layout = len(segment.pending), _first_seen(segment, window), segment.layout
    start = segment.start - first
    mask = torch.zeros(segment.count, segment.end - first, dtype=torch.bool)
    mask[:, :start] = True
    mask[:fed, start : start + fed] = torch.ones(fed, fed, dtype=torch.bool).tril_()
    if layout is not None:
        mask[fed:, start : start + fed] = True
        mask[fed:, start + fed :] = layout.visible(segment.since)
    if window is not None:
        root = segment.start + fed
        keys = [*range(first, root), *([] if layout is None else layout.positions(root))]
        mask &= torch.tensor(segment.positions)[:, None] - torch.tensor(keys)[None] < window
    return mask


def attend(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens of all segments, head dim]
    key: Tensor,  # [1, kv heads, tokens of all segments, head dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_plan: AttentionPlan,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # attention sinks, one logit per head
    **_: object,
) -> tuple[Tensor, None]:  # [1, tokens, heads, head dim]
    # We never pass a mask or older keys, so these come from the model: a bias, or keys of no token, that we would drop.
    if attention_mask is not None or key.shape[2] != query.shape[2]:
        raise UnsupportedModel(f"{type(module).__name__} adds a mask or keys of its own, which is not supported")
    rule = AttentionRule(scaling if scaling is not None else query.shape[-1] ** -0.5, softcap, s_aux)
    return attention_plan.attend(module, query, key, value, rule), None


def _attend(
    q: Tensor,  # [heads, queries, dim]
    k: Tensor,  # [kv heads, keys, dim]
    v: Tensor,
    mask: Tensor | None,  # [queries, keys]
    rule: AttentionRule,
) -> Tensor:  # [heads, queries, dim]
    groups, queries = q.shape[0] // k.shape[0], q.shape[1]
    # Query heads that share a key head become further rows of its query matrix, so no key is repeated.
    q = q.reshape(k.shape[0], groups * queries, q.shape[2])
    mask = mask if mask is None or groups == 1 else mask.repeat(groups, 1)
    if rule.softcap is None and rule.sinks is None:
        out = nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=rule.scaling)[0]
    else:
        scores = (q @ k.transpose(1, 2)) * rule.scaling
        if rule.softcap is not None:
            scores = torch.tanh(scores / rule.softcap) * rule.softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        if rule.sinks is not None:
            sink = rule.sinks.reshape(k.shape[0], groups, 1, 1).expand(-1, -1, queries, 1)
            scores = torch.cat([scores, sink.reshape(k.shape[0], groups * queries, 1).to(scores)], dim=-1)
        probs = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        out = probs[..., : k.shape[1]].to(v.dtype) @ v
    return out.reshape(groups * k.shape[0], queries, v.shape[2])


AttentionInterface.register(NAME, attend)
