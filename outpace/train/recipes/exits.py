"""Early exits for LayerSkip training: logits after each layer, layer dropout, and the weights of the exits."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.models.hf.module import decoder_layers
from outpace.models.hf.snapshot import SkippedLayer
from outpace.models.hf.stages import LayerSpan, Stage


class Exits:
    """A model's layers, with its final norm and head applied after any of them."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        decoder, name = decoder_layers(model)
        self.layers: nn.ModuleList = getattr(decoder, name)
        self.tail: Stage | None = None
        self._pairs = False  # whether a layer returns its states in a tuple

    def run(self, tokens: Tensor, dropped: Tensor) -> list[Tensor]:  # [batch, tokens], [layers, batch]
        """Return the output of each layer; where a text drops a layer, its input."""  # of [batch, tokens, hidden]
        left: list[Tensor] = []

        def leave(_: nn.Module, args: tuple[Tensor, ...], given: dict[str, Tensor], out: Any) -> Any:
            self._pairs = isinstance(out, tuple)
            states, gone = out[0] if self._pairs else out, dropped[len(left)]
            if gone.any():
                states = torch.where(gone[:, None, None], args[0] if args else given["hidden_states"], states)
            left.append(states)
            return (states, *out[1:]) if self._pairs else states

        with ExitStack() as hooks:
            for layer in self.layers:
                hooks.callback(layer.register_forward_hook(leave, with_kwargs=True).remove)
            self.model.get_decoder()(input_ids=tokens, use_cache=False)
        return left

    def logits(self, states: Tensor) -> Tensor:  # [positions, hidden] -> [positions, vocab]
        """Apply the final norm and the head to the output of some layer; call `run` first."""
        if self.tail is None:
            self.tail = Stage(self.model, LayerSpan(len(self.layers) - 1, len(self.layers)))
            self.tail.layers[0] = SkippedLayer(self.tail.layers[0], self._pairs)
        rows = torch.arange(len(states), device=states.device)
        ran = self.tail.run(rows, states, rows, position_ids=torch.zeros_like(rows)[None], use_cache=False)
        assert ran.logits is not None
        return ran.logits


def probs(layers: int, most: float, ramp: float = 1.0) -> Tensor:  # [layers]
    """Return the dropout probability of each layer: 0 for the first, highest for the last."""
    indices = torch.arange(layers, dtype=torch.float64)
    return ramp * most * (torch.exp(indices * math.log(2) / max(layers - 1, 1)) - 1)


def ramped(step: int, total: int) -> float:
    """Return a factor that rises from 0 at the first step to 1 at the last."""
    return math.exp(step * math.log(2) / max(total - 1, 1)) - 1


def rotational(step: int, layers: int, rotation: int) -> list[int]:
    """Return the active exits: every `rotation`-th layer, another set at each step, and always the last layer."""
    return [i for i in range(layers) if i % rotation == step % rotation or i == layers - 1]


def gradual(step: int, layers: int, total: int) -> list[int]:
    """Return the active exits: from the last layer downwards, and all of them from the middle of the run on."""
    reached = step * 2 * layers // max(total, 1)
    return list(range(max(0, layers - 1 - reached), layers))


def weights(active: list[int], layers: int, scale: float) -> dict[int, float]:
    """Return the weight of each active exit: later exits weigh more, the last one most; the sum is 1."""

    def weight(layer: int) -> float:
        if layer < layers - 1:
            return scale * layer * (layer + 1) / 2
        return layers - 1 + scale * (layers - 2) * (layers - 1) / 2

    found = {layer: weight(layer) for layer in active}
    total = sum(found.values())
    return {layer: value / total for layer, value in found.items() if value} if total else {layers - 1: 1.0}
