"""Pruned: the target without some of its layers is its own draft model, with a separate cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from outpace.core.lm import LM, layers_of
from outpace.drafting.layer_search import LayerProbe, ProbeText, parse, spell, without
from outpace.drafting.model_drafter import SelfDrafting
from outpace.errors import UsageError, unknown

AUTO = "auto"
RULES = ("angle", "search")
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Pruned(SelfDrafting):
    """The target without some of its layers drafts."""

    remove: int | str = 0  # number of layers; 0: an eighth of them; "auto": as many as pay on the first prompt
    by: str = "angle"  # "angle": the block that turns its input least; "search": layers anywhere
    layers: str | tuple[int, ...] = ""  # instead: keep exactly these, such as "0-8+15-29"
    depth: int = 4
    nodes: int = 0  # 0: depth * width
    width: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.remove != AUTO and (isinstance(self.remove, str) or self.remove < 0):
            raise UsageError(f"remove={self.remove!r} is neither a number of layers nor {AUTO!r}")
        if self.by not in RULES:
            raise unknown("pruning rule", self.by, RULES)
        if self.layers and self.remove:
            raise UsageError("pruned takes either a number of layers to remove or the layers to keep, not both")

    def make(self, target: LM, tokens: list[int]) -> LM:
        kept = sorted(set(parse(self.layers))) if self.layers else self._chosen(LayerProbe(target, [ProbeText(tokens)]))
        logger.info("pruned drafts with layers %s of %d", spell(kept), layers_of(target).count)
        return layers_of(target).slice(kept)

    def _chosen(self, probe: LayerProbe) -> list[int]:
        layer_count = layers_of(probe.target).count
        count = self.remove or max(1, layer_count // 8)
        if isinstance(count, str):
            count = probe.best_count(max(1, layer_count // 2), self.depth)
        if count >= layer_count:
            raise UsageError(f"remove={count} leaves no layer: this model has {layer_count}")
        return without(layer_count, probe.block(count) if self.by == "angle" else probe.search(count))
