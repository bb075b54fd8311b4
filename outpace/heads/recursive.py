"""Recursive: heads that draft one token per step and feed their own hidden state to the next step.

Such a head is a small Transformers model with hidden states as a second input. So it runs like any draft model, in
packed passes over trees and ragged batches, compiled or as CUDA graphs. `eagle3` and `mtp` define how tokens and states
enter it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from outpace.errors import UsageError
from outpace.heads import chain_attention, layers as parts
from outpace.heads.base import ChainStepOutput, Head, HeadSpec, embedding
from outpace.models.embeddings import Embeddings

COPIED = ("rope_parameters", "rms_norm_eps", "hidden_act", "head_dim", "num_attention_heads", "num_key_value_heads")


def layer_config(embeddings: Embeddings, spec: HeadSpec) -> PreTrainedConfig:
    """Return the config of a head's layers: layers of the target, or others of its width.

    Sizes of the latter that the target's config does not name are small.
    """
    target, hidden = embeddings.config, embeddings.hidden
    if spec.parts == parts.TARGET:
        if target is None:
            raise UsageError("a head with the target's own layers needs a Transformers model as target")
        return parts.alone(target)
    given: dict[str, Any] = {"num_attention_heads": max(1, hidden // 64), "num_key_value_heads": max(1, hidden // 64)}
    given |= {n: getattr(target, n) for n in COPIED if getattr(target, n, None) is not None} if target else {}
    rope = given.pop("rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # if kinds of layers have different rotations
    if rope and rope.get("rope_type", "default") in ("default", "llama3", "linear"):
        given["rope_parameters"] = rope  # else plain rotations suffice: a head looks back only a short way
    wide = getattr(target, "intermediate_size", None) or 4 * hidden
    return parts.KNOWN[spec.parts].config(
        vocab_size=embeddings.vocab, hidden_size=hidden, intermediate_size=spec.feedforward or wide,
        num_hidden_layers=spec.layers, max_position_embeddings=1 << 20, tie_word_embeddings=False,
        **(given | copy.deepcopy(spec.shape)),
    )  # fmt: skip


class RecursiveDecoder(nn.Module):
    """The decoder of a recursive head: the entry for a token and a state, and the layers after it."""

    layers: nn.ModuleList

    def __init__(self, config: PreTrainedConfig, embeddings: Embeddings, spec: HeadSpec):
        super().__init__()
        self.config, self.spec = config, spec
        self.parts = parts.classes_of(spec.parts, config)
        self.embed = embedding(embeddings)
        self.norm = self.parts.norm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = self.parts.rotary(config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Change device or precision, but keep rotations in full precision, since positions are large numbers."""
        buffers = dict(self.rotary_emb.named_buffers())
        super()._apply(fn, recurse)
        for name, old in buffers.items():
            self.rotary_emb._buffers[name] = old.to(self.norm.weight.device)  # type: ignore[arg-type]
        return self

    def fuse(self, hidden: Tensor) -> Tensor:
        """Fuse the target's states into the one that enters."""  # [..., taps * hidden] -> [..., hidden]
        return hidden

    def enter(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the input of the first layer, and further arguments of every layer."""
        raise NotImplementedError

    def forward(self, input_ids: Tensor, features: Tensor | None, position_ids: Tensor, **given: Any) -> Any:
        embeds = self.embed(input_ids)
        states = torch.zeros_like(embeds) if features is None else features
        states, beside = self.enter(embeds, states)
        rotations = self.rotary_emb(states, position_ids)
        for layer in self.layers:
            states = layer(states, position_embeddings=rotations, position_ids=position_ids, **beside, **given)
        normed = self.norm(states)
        # The state that is fed back comes first, because a tap of the last state records the first one.
        return BaseModelOutput(last_hidden_state=normed if self.spec.normed else states, hidden_states=(normed,))


class Recursive(Head, PreTrainedModel):
    """A head of one or more layers that sees its own draft tokens."""

    config_class = PreTrainedConfig
    base_model_prefix = "model"
    _supports_attention_backend = True
    _supports_sdpa = True
    takes_features = True
    entrance: type[RecursiveDecoder]
    config: PreTrainedConfig

    def __init__(self, embeddings: Embeddings, spec: HeadSpec, ids: Tensor | None = None):
        super().__init__(layer_config(embeddings, spec))
        self.spec = spec
        self.model = self.entrance(self.config, embeddings, spec)
        self.equip(embeddings, ids)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # a layer of the target runs its experts as the target does

    def get_decoder(self) -> nn.Module:  # type: ignore[override]
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.output if self.spec.own_output else self.unembed

    def set_output_embeddings(self, new: nn.Module) -> None:
        setattr(self, "output" if self.spec.own_output else "unembed", new)

    def fuse(self, hidden: Tensor) -> Tensor:
        """Fuse the target's states into the one that enters."""  # [..., taps * hidden] -> [..., hidden]
        return self.model.fuse(hidden.to(self.model.embed.weight.dtype))

    def forward(
        self, input_ids: Tensor, features: Tensor | None = None, position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0, narrow: bool = False, **given: Any,
    ) -> CausalLMOutput:  # fmt: skip
        """Run the head; `narrow`: return logits of the draft vocabulary, not of the target's."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        out = self.model(input_ids, features, position_ids, **given)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.get_output_embeddings()(out.hidden_states[0][:, kept])
        return CausalLMOutput(logits=logits if narrow else self.spread(logits, self.config.vocab_size))

    def unroll(self, tokens: Tensor, hidden: Tensor, steps: int, starts: Tensor | None = None) -> list[ChainStepOutput]:
        outputs: list[ChainStepOutput] = []
        states, chained = self.model.fuse(hidden), chain_attention.ChainCache()
        columns = torch.arange(tokens.shape[1], device=tokens.device)[None]
        before, self.config._attn_implementation = self.config._attn_implementation, chain_attention.NAME
        try:
            for step in range(steps):
                ahead = nn.functional.pad(tokens[:, 1 + step :], (0, 1 + step))
                out = self.model(ahead, states, columns + step, chained=chained)
                states = out.last_hidden_state
                at = (columns + step + 1).expand_as(tokens)
                outputs.append(ChainStepOutput(out.hidden_states[0], at, self.get_output_embeddings()))
        finally:
            self.config._attn_implementation = before  # drafting uses another attention
        return outputs
