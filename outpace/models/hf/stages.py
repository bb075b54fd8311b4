"""Stage: consecutive decoder layers of a Transformers model as a forward pass of their own, on the model's own modules.

Only the modules above the layers are copied, and shallowly. So a stage costs nothing and runs the layers as they are,
compiled ones too. If the input of the first layer is given, embeddings are neither looked up nor scaled.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.models.hf.module import decoder_layers, trim


class LayerSpan(NamedTuple):
    """Layers from `first` up to, but excluding, `last`."""

    first: int
    last: int


class StageOutputs(NamedTuple):
    """The output of a stage."""

    states: Tensor  # [tokens, hidden]: the output of its last layer
    logits: Tensor | None  # [nodes, vocab], if any were requested


class Stage:
    """A span of a model's layers; the final norm and the head follow every span. The model must be our own copy."""

    def __init__(self, model: PreTrainedModel, span: LayerSpan):
        decoder, name = decoder_layers(model)
        path = next(path for path, module in model.named_modules() if module is decoder).split(".")
        self.model = parent = _shallow(model)
        for part in path if path != [""] else []:
            parent._modules[part] = _shallow(parent._modules[part])  # type: ignore[arg-type]
            parent = parent._modules[part]  # type: ignore[assignment]
        self.decoder: nn.Module = parent
        self.layers = nn.ModuleList(getattr(decoder, name)[span.first : span.last])
        self.decoder._modules[name] = self.layers
        original = self.decoder.config
        self.decoder.config = copy.deepcopy(original)  # type: ignore[assignment]
        self.decoder.config._attn_implementation = original._attn_implementation  # type: ignore[union-attr]
        trim(self.decoder.config, range(span.first, span.last))  # type: ignore[arg-type]

    def run(self, ids: Tensor, entering: Tensor | None, nodes: Tensor | None, **given: Any) -> StageOutputs:
        """Run a pass; `nodes` are those whose logits are needed, or None."""  # [tokens], [tokens, hidden], [nodes]
        if entering is None:
            given["input_ids"] = ids[None]
        else:
            given["inputs_embeds"] = entering[None]
        with _hooked(self.layers, entering) as outputs:
            if nodes is None:
                self.decoder(**given)
                return StageOutputs(outputs[0], None)
            logits = self.model(**given, logits_to_keep=nodes).logits[0]
            return StageOutputs(outputs[0], logits)


def _shallow(module: nn.Module) -> Any:
    """Copy a module so that its children can be replaced; everything else stays shared."""
    new = copy.copy(module)
    new._modules = dict(module._modules)
    return new


@contextmanager
def _hooked(layers: nn.ModuleList, entering: Tensor | None) -> Iterator[list[Tensor]]:
    """Give `entering` to the first layer, whatever the model made of it, and collect the last layer's output."""
    outputs: list[Tensor] = []

    def replace(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert entering is not None
        if args:
            return (entering[None], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": entering[None]}

    def collect(_: nn.Module, args: object, out: Any) -> None:
        outputs.append((out[0] if isinstance(out, tuple) else out)[0])

    handles = [layers[-1].register_forward_hook(collect)]
    if entering is not None:
        handles.append(layers[0].register_forward_pre_hook(replace, with_kwargs=True))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
