"""Compiled layers: one layer of a kind is compiled, and all of that kind run the same code on their own weights.

Products go to our kernels, and those that take the same rows become one: found in the traced graph, whatever the
model calls them, and without a copy of any weight. Torch's compiler has the rest.
"""

from __future__ import annotations

import inspect
import operator
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence as Seq
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.fx.experimental import _config as shapes
from transformers import PreTrainedModel

from outpace.models.compiled import bf16_copies, code_cache
from outpace.models.compiled.packing import CompiledAttention
from outpace.models.hf import int8
from outpace.models.hf.module import M, decoder_layers, twin
from outpace.models.kernels.triton_runtime import overlaps
from outpace.storage.files import cache_dir

PLACE = "TORCHINDUCTOR_CACHE_DIR"
FUSED = 4  # most products that become one
LIMITS = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}  # of code for one function
# What multiplies, and the names of its operands: input, weight, scale if any, bias.
PRODUCTS: dict[Any, tuple[str, ...]] = {
    torch._C._nn.linear: ("input", "weight", "bias"),
    nn.functional.linear: ("input", "weight", "bias"),
    bf16_copies.LINEAR: ("x", "weight", "bias"),
    int8.LINEAR: ("x", "weight", "scale", "bias"),
}


class LayerKind:
    """Layers that are one piece of code: compiled once, then called without the compiler's checks.

    What those checks look at does not change between passes, but for values and sizes, and sizes are symbols of the
    code. On a CPU they cost more than all else that happens between two kernels.
    """

    def __init__(self, place: Path | None = None) -> None:
        """`place`: where the code is kept for the next process, on a CPU."""
        self.graphs = 0
        self.code: Callable[..., Any] | None = None
        self.names: list[str] = []  # of the code's arguments, as the compiler found them from a call of the layer
        self.direct = False
        self.place = place
        self.kept = False  # the code was not compiled here
        if place is not None and (known := code_cache.load(place)) is not None:
            self.code, self.names, self.direct, self.kept = known.call, known.names, True, True

    def forget(self) -> None:
        """Compile it after all: the code that was kept is wrong."""
        if self.kept and self.place is not None:
            shutil.rmtree(self.place, ignore_errors=True)
        self.graphs, self.code, self.names, self.direct, self.kept = 0, None, [], False, False

    def backend(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Torch's own compiler, after products went to our kernels."""
        from torch._inductor.compile_fx import compile_fx

        sources = [node.meta["grapharg"].source for node in module.graph.nodes if node.op == "placeholder"]
        self.names = [source.name() if callable(source.name) else source.name for source in sources]
        fuse(module.graph)
        module.recompile()
        # The sizes of buffers are asserted before every kernel otherwise.
        settings: dict[str, Any] = {"size_asserts": False}
        devices = {given.device for given in inputs if isinstance(given, Tensor) and given.is_cuda}
        settings |= _together(devices) if devices else {}
        with nullcontext() if self.place is None else code_cache.keeping(self.place, self.names):
            self.code = compile_fx(module, inputs, config_patches=settings)  # type: ignore[assignment]
        self.graphs += 1  # not before: the compiler may give up here to trace the layer anew
        return self.code  # type: ignore[return-value]

    def seen(self, result: object) -> None:
        """After the first call, which compiled: one graph that gives one tensor can be called directly."""
        self.direct = self.graphs == 1 and isinstance(result, Tensor)


class ModuleProxy(nn.Module):
    """Stands for a module, and has what it has: models ask a layer for its kind of attention."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class LayerCall(ModuleProxy):
    """Hands a layer its own lane. All layers bear number 0, so that they are one piece of code to the compiler."""

    def __init__(self, inner: nn.Module, index: int, kind: LayerKind):
        super().__init__(inner)
        self.index, self.kind = index, kind
        parameters = inspect.signature(inner.forward).parameters
        self.input_name = next(iter(parameters))
        self.rest_name = next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), "")
        self._given: list[Any] = []  # arguments of the code, those of this layer filled in
        self._places: list[int] = []  # of the others
        self._rest: Callable[[dict[str, Any]], list[Any]] | None = None
        self._bound: Callable[..., Any] | None = None  # the code that these are for

    def forward(self, hidden: Tensor, *args: Any, attention_plan: tuple[CompiledAttention, ...], **kwargs: Any) -> Any:
        kwargs["attention_plan"] = attention_plan[self.index]
        if not self.kind.direct or args:
            # Sizes that are equal in this call may not be so in the next. And every model compiles its own code for the
            # same layer: beyond the compiler's limit for one function a layer would silently run as it is.
            # Numbers of a layer are a part of its code: they make its kind, and code with them in it can be kept.
            limits = LIMITS | {"specialize_float": self.kind.place is not None}
            with shapes.patch(use_duck_shape=False), dynamo.patch(limits):  # type: ignore[attr-defined]
                result = self.inner(hidden, *args, **kwargs)
            self.kind.seen(result)
            return result
        rest = self._rest if self._rest is not None and self._bound is self.kind.code else self._bind()
        given, named = self._given.copy(), {**kwargs, self.rest_name: kwargs, self.input_name: hidden}
        for place, value in zip(self._places, rest(named), strict=True):
            given[place] = value
        assert self.kind.code is not None
        return self.kind.code(*given)[0]

    def _bind(self) -> Callable[[dict[str, Any]], list[Any]]:
        """Look up what belongs to this layer, once: its weights and numbers; the rest is looked up in every call."""
        names = self.kind.names
        own = {i: name for i, name in enumerate(names) if name.startswith("L['self']")}
        self._given = [None] * len(names)
        for i, name in own.items():
            value = eval(name, {}, {"L": {"self": self.inner}})  # a path through the module, written by the compiler
            self._given[i] = torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value
        self._places = [i for i in range(len(names)) if i not in own]
        self._bound = self.kind.code
        self._rest = rest = eval(f"lambda L: [{', '.join(names[i] for i in self._places)}]", {})
        return rest


def signature(layer: nn.Module, window: int | None) -> tuple[Any, ...]:
    """What makes two layers the same code: their modules, with all that is no tensor, and the shapes of the tensors."""
    plain = (bool, int, float, str, type(None))
    modules = tuple(
        (name, type(module), tuple((k, v) for k, v in sorted(vars(module).items()) if isinstance(v, plain)))
        for name, module in layer.named_modules()
    )
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return window, modules, tuple((name, tuple(t.shape), t.dtype) for name, t in tensors)


class OutputHead(nn.Module):
    """The output embeddings, through our kernels: one product is nothing to compile."""

    def __init__(self, inner: nn.Linear | bf16_copies.Bf16Linear | int8.Int8Linear):
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        weight, bias = self.inner.weight, self.inner.bias
        scales = [self.inner.scale] if isinstance(self.inner, int8.Int8Linear) else []
        if weight.is_cuda:
            return torch.ops.outpace.linears(hidden.flatten(0, -2), [weight], scales, [bias])[0].unflatten(0, (1, -1))
        return torch.ops.outpace_cpu.linears(hidden, [weight], scales, [bias])


class CompiledModule(ModuleProxy):
    """What stands beside the layers, the last norm and the angles of positions, compiled: it would be many kernels.

    What the compiler cannot do runs as it is.
    """

    def __init__(self, inner: nn.Module, settings: dict[str, Any]):
        super().__init__(inner)
        inner.compile(dynamic=True, options=settings)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with dynamo.patch(LIMITS | {"suppress_errors": True}), warnings.catch_warnings():  # type: ignore[attr-defined]
            warnings.filterwarnings("ignore", "TensorFloat32")  # angles are products in full precision, on purpose
            return self.inner(*args, **kwargs)


def shortened(model: M) -> M:
    """A twin of a model that is not compiled, on a CPU, whose products read int8 weights through our kernels."""
    ours = twin(model)
    for parent, name, child in int8.linears(ours):
        setattr(parent, name, OutputHead(int8.Int8Linear(child)))
    return ours


def _together(devices: Iterable[torch.device]) -> dict[str, Any]:
    """On a GPU, kernels that do not need each other become one, and start while the one before ends."""
    return {"combo_kernels": True, "triton.enable_pdl": all(map(overlaps, devices))}


def _small(module: nn.Module) -> bool:
    return all(tensor.dim() < 2 for tensor in module.parameters())


def compile_layers(model: PreTrainedModel, windows: Seq[int | None]) -> list[LayerKind]:
    """Make the layers of this model, which must be ours, run compiled, and its head through our kernels."""
    # Compiled code outlives the process; the user's own choice of a place for it comes first.
    if os.environ.get(PLACE) in (None, default_cache_dir()):
        os.environ[PLACE] = str(cache_dir() / "inductor")
    decoder, name = decoder_layers(model)
    stack, calls, kinds = getattr(decoder, name), list[nn.Module](), dict[Any, LayerKind]()
    for i, (layer, window) in enumerate(zip(stack, windows, strict=True)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0  # type: ignore[assignment]
        about = signature(layer, window)
        if about not in kinds:
            kinds[about] = LayerKind(code_cache.place(layer, about) if model.device.type == "cpu" else None)
        kind = kinds[about]
        layer.compile(backend=kind.backend, dynamic=True)
        calls.append(LayerCall(layer, i, kind))
    setattr(decoder, name, nn.ModuleList(calls))
    for place, child in decoder.named_children():
        if model.device.type == "cuda" and not isinstance(child, nn.ModuleList) and _small(child):
            setattr(decoder, place, CompiledModule(child, _together([model.device])))
    head = model.get_output_embeddings()
    if type(head) is nn.Linear or isinstance(head, bf16_copies.Bf16Linear | int8.Int8Linear):
        model.set_output_embeddings(OutputHead(head))
    return list(kinds.values())


def fuse(graph: fx.Graph) -> None:
    """Replace linear layers, those with the same input together."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if _is_product(node):
            groups.setdefault(_operands(node)[0], []).append(node)
    for x, nodes in groups.items():
        for i in range(0, len(nodes), FUSED):
            _replace(graph, x, nodes[i : i + FUSED])


def _is_product(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in PRODUCTS:
        return False
    # Weights that are computed inside the layer are not there yet where the group's first product stands.
    x, *rest = _operands(node)
    weight = _value(rest[0])
    if any(isinstance(other, fx.Node) and other.op not in ("placeholder", "get_attr") for other in rest):
        return False
    return weight.dim() == 2 and (weight.is_cuda or _value(x).dtype == torch.float32)


def _operands(node: fx.Node) -> list[Any]:
    """In the order of `PRODUCTS`; what is not given is None."""
    names = PRODUCTS[node.target]
    given = [*node.args, *[None] * (len(names) - len(node.args))]
    return [node.kwargs.get(name, value) for name, value in zip(names, given, strict=True)]


def _value(node: fx.Node) -> Tensor:
    return node.meta["example_value"]


def _replace(graph: fx.Graph, x: fx.Node, nodes: list[fx.Node]) -> None:
    """One call for all of `nodes`, where the first of them stands."""
    operands = [_operands(node) for node in nodes]
    weights = [given[1] for given in operands]
    scales = [given[2] for given in operands if len(given) == 4]
    biases = [given[-1] for given in operands]
    if scales and len(scales) < len(nodes):
        return
    with graph.inserting_before(nodes[0]):
        if _value(weights[0]).is_cuda:
            parts = _on_gpu(graph, x, (weights, scales, biases))
        else:
            out = graph.call_function(torch.ops.outpace_cpu.linears.default, (x, weights, scales, biases))
            sizes = [_value(weight).shape[0] for weight in weights]
            ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
            columns: list[Any] = [(Ellipsis, slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
            parts = [graph.call_function(operator.getitem, (out, at)) for at in columns] if len(nodes) > 1 else [out]
            for node, part in zip(nodes, parts, strict=True):  # or the code could not be kept
                part.meta["example_value"] = _value(node)
    for node, part in zip(nodes, parts, strict=True):
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def _on_gpu(graph: fx.Graph, x: fx.Node, matrices: tuple[list[Any], ...]) -> list[fx.Node]:
    flat = graph.call_method("flatten", (x, 0, -2))
    out = graph.call_function(torch.ops.outpace.linears.default, (flat, *matrices))
    parts = [graph.call_function(operator.getitem, (out, i)) for i in range(len(matrices[0]))]
    return [graph.call_method("unflatten", (part, 0, (1, -1))) for part in parts]
