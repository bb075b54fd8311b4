"""LayerSkip: the target drafts with its own first layers and verifies with the others.

The draft uses the target's own KV cache, and a pass of the target continues where the draft stopped, so no layer runs
twice for a draft token. A model trained for early exits drafts well; most others need most of their layers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from outpace.core.lm import LM, layers_of
from outpace.core.sequence import Sequence
from outpace.drafting.layer_search import LayerProbe, ProbeText, parse, spell, without
from outpace.drafting.model_drafter import SelfDrafting
from outpace.errors import UsageError

AUTO = "auto"
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class LayerSkip(SelfDrafting):
    """The target's first layers draft; its other layers verify."""

    exit: int | str = 0  # after this many layers; 0: a quarter of them; "auto": chosen on the first prompt
    skip: int | str | tuple[int, ...] = 0  # instead: leave out N, found on the first prompt, or these: "9+12-14"
    depth: int = 4
    nodes: int = 0  # 0: depth * width
    width: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exit != AUTO and (isinstance(self.exit, str) or self.exit < 0):
            raise UsageError(f"exit={self.exit!r} is neither a number of layers nor {AUTO!r}")
        if isinstance(self.skip, int) and self.skip < 0:
            raise UsageError(f"skip={self.skip} is not a number of layers")
        if self.skip and self.exit:
            raise UsageError("layerskip takes either an exit or layers to skip, not both")
        self._shared = False  # whether the draft uses the target's own cache slots

    def make(self, target: LM, tokens: list[int]) -> LM:
        probe = LayerProbe(target, [ProbeText(tokens)])
        if self.skip:
            gone = probe.search(self.skip) if isinstance(self.skip, int) else parse(self.skip)
            logger.info("layerskip leaves out layers %s of %d", spell(gone), layers_of(target).count)
            self._shared = False
            return layers_of(target).slice(without(layers_of(target).count, gone))
        layers = self.exit or max(1, layers_of(target).count // 4)
        layers = probe.best_exit(self.depth) if isinstance(layers, str) else layers
        if layers >= layers_of(target).count:
            raise UsageError(
                f"exit={layers} leaves nothing to verify with: this model has {layers_of(target).count} layers"
            )
        logger.info("layerskip exits after %d of %d layers", layers, layers_of(target).count)
        early = layers_of(target).early_exit(layers)
        self._shared = early is not None
        return layers_of(target).slice(range(layers)) if early is None else early

    def slot(self, seq: Sequence) -> int:
        lm = self.lm(seq)
        if not self._shared:
            return super().slot(seq)
        assert seq.slot is not None, f"a running sequence has a slot, which {type(lm).__name__} shares"
        return seq.slot
