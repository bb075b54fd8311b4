"""Access to parts of a Transformers model: decoder layers, hidden states, embeddings, twins that share its tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from outpace.errors import UnsupportedModel, UsageError
from outpace.models.embeddings import Embeddings
from outpace.models.quantized import tensors

M = TypeVar("M", bound=nn.Module)
STATE = (-1,)  # the tap of the state that a draft feeds back to itself: the last one


def twin(model: M) -> M:
    """Copy the module tree and the config, sharing every tensor, so that we can hook and configure the copy."""
    shared = {id(t): t for t in tensors(model)}
    return copy.deepcopy(model, shared).eval()


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, str]:
    """Return the decoder and the name of its layer stack, which is the longest of the outermost module lists."""
    modules = [model.get_decoder()]
    while modules:
        named = [(module, *child) for module in modules for child in module.named_children()]
        stacks = [(len(child), name, module) for module, name, child in named if isinstance(child, nn.ModuleList)]
        if stacks:
            _, name, decoder = max(stacks, key=lambda stack: stack[0])
            return decoder, name
        modules = [child for _, _, child in named]
    raise UnsupportedModel(f"{type(model).__name__} has no list of decoder layers to tap or to slice")


def layer_count(model: PreTrainedModel) -> int:
    """Return the number of decoder layers; 0 for a model without a list of them."""
    try:
        return len(getattr(*decoder_layers(model)))
    except UnsupportedModel:
        return 0


def context_length(config: PreTrainedConfig) -> int:
    """Return the most tokens that a sequence can hold.

    Longrope rotates every key of a pass by the length of the longest sequence. Past its switching point a token would
    depend on what it is batched or drafted with, so sequences end there.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    switches = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    return min([getattr(text, "max_position_embeddings", None) or 1 << 30, *switches])


@contextmanager
def recording(model: PreTrainedModel, taps: tuple[int, ...], row: int | None = 0) -> Iterator[dict[int, Tensor]]:
    """Record hidden states of a pass, for one sequence (`row`) of the batch, or for all of them if `row` is None.

    Taps are numbered as in Transformers: 0 is the embeddings, i the output of layer i, and the last one comes after
    the final norm. Negative taps count from the end.
    """
    recorded: dict[int, Tensor] = {}  # tap -> [tokens, hidden], or [batch, tokens, hidden]
    handles: list[RemovableHandle] = []
    if not taps:
        yield recorded
        return
    decoder, name = decoder_layers(model)
    stack = getattr(decoder, name)

    def keep(tap: int, states: Tensor) -> None:
        recorded[tap] = states if row is None else states[row]

    def record_input(tap: int, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        keep(tap, args[0] if args else kwargs["hidden_states"])

    def record_output(tap: int, out: object) -> None:
        keep(tap, out[0] if isinstance(out, tuple) else out.last_hidden_state)  # type: ignore[attr-defined]

    try:
        for tap in taps:
            index = tap if tap >= 0 else len(stack) + 1 + tap
            if not 0 <= index <= len(stack):
                raise UsageError(f"tap {tap} is out of range for a model of {len(stack)} layers")
            if index == len(stack):
                handles.append(decoder.register_forward_hook(lambda _, a, out, tap=tap: record_output(tap, out)))
            else:  # the output of layer i is the input of layer i + 1
                hook = stack[index].register_forward_pre_hook
                handles.append(hook(lambda _, args, kwargs, tap=tap: record_input(tap, args, kwargs), with_kwargs=True))
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def view(model: PreTrainedModel, layers: Seq[int] | None = None) -> PreTrainedModel:
    """Return a twin of the model, or of some of its layers, on the same tensors."""
    ours = twin(model)
    if layers is not None:
        decoder, name = decoder_layers(ours)
        stack, config = getattr(decoder, name), ours.config.get_text_config()
        if not layers or any(not 0 <= i < len(stack) for i in layers):
            raise UsageError(f"a slice takes layers 0 to {len(stack) - 1}, got {list(layers)}")
        setattr(decoder, name, nn.ModuleList(stack[i] for i in layers))
        for place, layer in enumerate(getattr(decoder, name)):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = place  # type: ignore[assignment]
        trim(config, layers)
    return ours


def windows(config: PreTrainedConfig) -> list[int | None] | None:
    """Return each layer's sliding window (None: full attention), or None for a model with any other kind of layer."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"} or getattr(text, "num_kv_shared_layers", None):
        return None
    layers = DynamicCache(config=config).layers
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        return None
    return [layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in layers]


def embeddings_of(model: PreTrainedModel) -> Embeddings | None:
    """Return the embedding and output matrices, or None if these are not plain matrices of the same shape."""
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    given = [getattr(module, "weight", None) for module in (embed, head)]
    config = model.config.get_text_config()
    if getattr(config, "tie_word_embeddings", False) and given[0] is not None:
        given[1] = given[0]  # a quantised head is a copy of the embeddings
    for w in given:
        if not isinstance(w, Tensor) or is_traceable_wrapper_subclass(w) or not w.is_floating_point() or w.dim() != 2:
            return None
    ends = Embeddings(given[0].detach(), given[1].detach(), config)  # type: ignore[union-attr]
    return ends if ends.unembed.shape == ends.embed.shape else None


def trim(config: PreTrainedConfig, layers: Seq[int]) -> None:
    """Make this config, which must be our own copy, describe a model of these layers."""
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[i] for i in layers]
    config.num_hidden_layers = len(layers)
