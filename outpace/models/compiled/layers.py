"""Compiled layers: `torch.compile` compiles one layer of each kind, and all layers of that kind share the code.

In the traced graph, linear layers are replaced by our kernels, and linear layers with the same input become one call.
This depends on no module names and copies no weights. Torch's compiler handles the rest.

After the first call, `LayerCall` calls the compiled function directly, without Dynamo's guards. This relies on:
- A call of the layer traces to one graph whose result is one tensor (`LayerKind.seen`). Otherwise the guards stay.
- Between passes only values and sizes change. Sizes are symbols in the code (dynamic=True, no duck shapes) and are at
  least 2 where they vary, since torch specializes on 0 and 1. Dtypes, devices, modes and argument names stay the same.
- `code_cache.signature` covers everything of a layer that its code depends on. Layers with equal signatures share code.
- Weights change in place only: `LayerCall` binds a layer's tensors once.
- Private torch API: Dynamo's names of the graph inputs (`L['self']...`) are expressions for `eval`, in argument order.
`CompiledRunner` compares the first passes with eager ones, but no later ones. After a mismatch or an error the model
runs eagerly.
Load with `compile=False` (`--no-compile`) to avoid compiled code. To compile but keep the guards, leave
`LayerKind.direct` False: then every call goes through `torch.compile`, and code kept on disk is not used.
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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from outpace.models.compiled import bf16_copies, code_cache
from outpace.models.compiled.packing import CompiledAttention
from outpace.models.hf import int8
from outpace.models.hf.module import M, decoder_layers, twin
from outpace.models.kernels.triton_runtime import overlaps
from outpace.models.quantized import is_plain
from outpace.storage.files import cache_dir

PLACE = "TORCHINDUCTOR_CACHE_DIR"
FUSED = 4  # the most linear layers that become one call
LIMITS = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}  # on compiled variants of one function
# The functions of linear layers, and the names of their operands: input, weight, scale if any, bias.
PRODUCTS: dict[Any, tuple[str, ...]] = {
    torch._C._nn.linear: ("input", "weight", "bias"),
    nn.functional.linear: ("input", "weight", "bias"),
    bf16_copies.LINEAR: ("x", "weight", "bias"),
    int8.LINEAR: ("x", "weight", "scale", "bias"),
}


class LayerKind:
    """Layers that share one piece of code. It is compiled once, then called without Dynamo's guards.

    Only values and sizes differ between passes, and sizes are symbols in the code. On a CPU the guards cost more than
    everything else that happens between two kernels.
    """

    def __init__(self, place: Path | None = None) -> None:
        """`place` is the folder that keeps the code for the next process (CPU only)."""
        self.graphs = 0
        self.code: Callable[..., Any] | None = None
        self.names: list[str] = []  # Dynamo's expressions for the code's arguments, in order
        self.direct = False
        self.place = place
        self.kept = False  # the code was loaded from disk, not compiled in this process
        if place is not None and (known := code_cache.load(place)) is not None:
            self.code, self.names, self.direct, self.kept = known.call, known.names, True, True

    def forget(self) -> None:
        """Delete code from disk that failed the check, so that the next call compiles the layer."""
        if self.kept and self.place is not None:
            shutil.rmtree(self.place, ignore_errors=True)
        self.graphs, self.code, self.names, self.direct, self.kept = 0, None, [], False, False

    def backend(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Replace the linear layers by our kernels, then run Torch's own compiler (a `torch.compile` backend)."""
        from torch._inductor.compile_fx import compile_fx

        sources = [node.meta["grapharg"].source for node in module.graph.nodes if node.op == "placeholder"]
        self.names = [source.name() if callable(source.name) else source.name for source in sources]
        fuse(module.graph)
        module.recompile()
        # Otherwise the sizes of buffers are asserted before every kernel.
        settings: dict[str, Any] = {"size_asserts": False}
        devices = {given.device for given in inputs if isinstance(given, Tensor) and given.is_cuda}
        settings |= _gpu_options(devices) if devices else {}
        keeping = nullcontext() if self.place is None else code_cache.keeping(self.place, self.names)
        with keeping, warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*_stable_hash_for_caching")  # of torchao's tensors
            self.code = compile_fx(module, inputs, config_patches=settings)  # type: ignore[assignment]
        self.graphs += 1  # last, because the compiler may give up above and trace the layer again
        return self.code  # type: ignore[return-value]

    def seen(self, result: object) -> None:
        """After a call that compiled: allow direct calls if there is one graph and its result is one tensor."""
        self.direct = self.graphs == 1 and isinstance(result, Tensor)


class ModuleProxy(nn.Module):
    """Wraps a module and forwards attribute access to it: models read the attention type of a layer."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class LayerCall(ModuleProxy):
    """Gives a layer its entry of the attention plan. All layers have index 0, so that they compile to the same code."""

    def __init__(self, inner: nn.Module, index: int, kind: LayerKind):
        super().__init__(inner)
        self.index, self.kind = index, kind
        parameters = inspect.signature(inner.forward).parameters
        self.input_name = next(iter(parameters))
        self.rest_name = next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), "")
        self._given: list[Any] = []  # the code's arguments, with this layer's own filled in
        self._places: list[int] = []  # indices of the other arguments
        self._rest: Callable[[dict[str, Any]], list[Any]] | None = None
        self._bound: Callable[..., Any] | None = None  # the code that these belong to

    def forward(self, hidden: Tensor, *args: Any, attention_plan: tuple[CompiledAttention, ...], **kwargs: Any) -> Any:
        kwargs["attention_plan"] = attention_plan[self.index]
        if not self.kind.direct or args:
            # No duck shapes: sizes that are equal in this call may differ in the next. High limits: each model compiles
            # its own code for the same function, and beyond the limit a layer would silently run eagerly.
            # On a CPU the floats of a layer are constants of its code and part of its kind, so the code can be kept.
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
        """Look up this layer's weights and numbers once. Return a function that finds the other arguments of a call."""
        names = self.kind.names
        own = {i: name for i, name in enumerate(names) if name.startswith("L['self']")}
        self._given = [None] * len(names)
        for i, name in own.items():
            value = eval(name, {}, {"L": {"self": self.inner}})  # an attribute path from Dynamo
            self._given[i] = torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else value
        self._places = [i for i in range(len(names)) if i not in own]
        self._bound = self.kind.code
        self._rest = rest = eval(f"lambda L: [{', '.join(names[i] for i in self._places)}]", {})
        return rest


class OutputHead(nn.Module):
    """The output head, run by our kernels: a single linear layer needs no compiling."""

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
    """A small module beside the layers, such as the final norm or the rotary embedding; uncompiled it is many kernels.

    A module that cannot be compiled runs eagerly.
    """

    def __init__(self, inner: nn.Module, settings: dict[str, Any]):
        super().__init__(inner)
        inner.compile(dynamic=True, options=settings)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with dynamo.patch(LIMITS | {"suppress_errors": True}), warnings.catch_warnings():  # type: ignore[attr-defined]
            warnings.filterwarnings("ignore", "TensorFloat32")  # rotary angles use full precision on purpose
            return self.inner(*args, **kwargs)


def with_int8_linears(model: M) -> M:
    """Return an uncompiled copy of a model, for a CPU, whose linear layers read int8 weights through our kernels."""
    ours = twin(model)
    for parent, name, child in int8.linears(ours):
        setattr(parent, name, OutputHead(int8.Int8Linear(child)))
    return ours


def _gpu_options(devices: Iterable[torch.device]) -> dict[str, Any]:
    """Return compiler options that merge independent kernels, and let a kernel start while the previous one ends."""
    return {"combo_kernels": True, "triton.enable_pdl": all(map(overlaps, devices))}


def _small(module: nn.Module) -> bool:
    return all(tensor.dim() < 2 for tensor in module.parameters())


def compile_layers(model: PreTrainedModel, windows: Seq[int | None]) -> list[LayerKind]:
    """Compile the layers of this model, which must be our own copy, and run its head through our kernels."""
    # Compiled code outlives the process. A cache folder that the user has set takes precedence.
    if os.environ.get(PLACE) in (None, default_cache_dir()):
        os.environ[PLACE] = str(cache_dir() / "inductor")
    decoder, name = decoder_layers(model)
    stack, calls, kinds = getattr(decoder, name), list[nn.Module](), dict[Any, LayerKind]()
    for i, (layer, window) in enumerate(zip(stack, windows, strict=True)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0  # type: ignore[assignment]
        about = code_cache.signature(layer, window)
        if about not in kinds:
            kinds[about] = LayerKind(code_cache.place(layer, about) if model.device.type == "cpu" else None)
        kind = kinds[about]
        layer.compile(backend=kind.backend, dynamic=True)
        calls.append(LayerCall(layer, i, kind))
    setattr(decoder, name, nn.ModuleList(calls))
    for place, child in decoder.named_children():
        if model.device.type == "cuda" and not isinstance(child, nn.ModuleList) and _small(child):
            setattr(decoder, place, CompiledModule(child, _gpu_options([model.device])))
    head = model.get_output_embeddings()
    if is_plain(head) or isinstance(head, bf16_copies.Bf16Linear | int8.Int8Linear):
        model.set_output_embeddings(OutputHead(head))
    return list(kinds.values())


def fuse(graph: fx.Graph) -> None:
    """Replace linear layers by our kernels, one call for those with the same input."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if _is_product(node):
            groups.setdefault(_operands(node)[0], []).append(node)
    for nodes in groups.values():
        for i in range(0, len(nodes), FUSED):
            _replace(graph, nodes[i : i + FUSED])


def _is_product(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target not in PRODUCTS:
        return False
    # A group's call stands where its first product stood. Weights computed inside the layer may not exist there yet.
    x, *rest = _operands(node)
    weight = _value(rest[0])
    if is_traceable_wrapper_subclass(weight):  # a quantised weight has kernels of its own
        return False
    if any(isinstance(other, fx.Node) and other.op not in ("placeholder", "get_attr") for other in rest):
        return False
    return weight.dim() == 2 and (weight.is_cuda or _value(x).dtype == torch.float32)


def _operands(node: fx.Node) -> list[Any]:
    """Return the operands in the order of `PRODUCTS`, None for missing ones."""
    names = PRODUCTS[node.target]
    given = [*node.args, *[None] * (len(names) - len(node.args))]
    return [node.kwargs.get(name, value) for name, value in zip(names, given, strict=True)]


def _value(node: fx.Node) -> Tensor:
    return node.meta["example_value"]


def _replace(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Replace `nodes`, which have the same input, by one call at the place of the first of them."""
    operands = [_operands(node) for node in nodes]
    x = operands[0][0]  # as it is now: if it was a product too, then it has been replaced
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
            for node, part in zip(nodes, parts, strict=True):  # needed to keep the code on disk
                part.meta["example_value"] = _value(node)
    for node, part in zip(nodes, parts, strict=True):
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def _on_gpu(graph: fx.Graph, x: fx.Node, matrices: tuple[list[Any], ...]) -> list[fx.Node]:
    flat = graph.call_method("flatten", (x, 0, -2))
    out = graph.call_function(torch.ops.outpace.linears.default, (flat, *matrices))
    parts = [graph.call_function(operator.getitem, (out, i)) for i in range(len(matrices[0]))]
    return [graph.call_method("unflatten", (part, 0, (1, -1))) for part in parts]
