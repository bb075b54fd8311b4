"""A model of which this process has a part: Transformers reads the part, and these modules put the results together.

Transformers reads each weight as a `DTensor`, of which every process has a piece, and replaces the `forward` of modules
by functions that are bound to them. Here the pieces become plain tensors, and modules of our own do the communication,
so that the model can be copied, sliced and run in higher precision like any other.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace.models.embeddings import Embeddings
from outpace.models.hf.module import embeddings_of
from outpace.models.tensor_parallel.processes import gathered_columns, summed

# Transformers' styles of sharing a module that work here. Of a replicated one every process has the whole.
STYLES = {
    "colwise", "colwise_gather_output", "colwise_rep", "rowwise", "rowwise_split_input", "rowwise_rep",
    "embedding_rowwise", "packed_colwise", "moe_tp_experts", "replicate", "replicated_with_grad_allreduce",
}  # fmt: skip


class SummedLinear(nn.Module):
    """A linear layer of which each process has some input columns; their products are added."""

    def __init__(self, part: nn.Linear, splits: bool):
        super().__init__()
        self.part, self.bias = part, part.bias
        self.splits = splits  # its input is whole, and each process takes its columns of it
        part.bias = None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        if self.splits:
            x = x.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()]
        out = summed(self.part(x))
        return out if self.bias is None else out + self.bias


class GatheredLinear(nn.Module):
    """A linear layer of which each process has some output rows, with the whole output."""

    def __init__(self, part: nn.Linear, width: int):
        super().__init__()
        self.part, self.width = part, width

    def forward(self, x: Tensor) -> Tensor:
        return gathered_columns(self.part(x), self.width)


class SplitEmbedding(nn.Module):
    """An embedding of which each process has some tokens."""

    def __init__(self, part: nn.Embedding, vocab: int):
        super().__init__()
        self.part, self.vocab = part, vocab
        self.first = -(-vocab // dist.get_world_size()) * dist.get_rank()

    @property
    def weight(self) -> Tensor:
        return self.part.weight

    def forward(self, ids: Tensor) -> Tensor:
        rows, ids = len(self.part.weight), ids - self.first
        found = self.part(ids.clamp(0, rows - 1))
        return summed(found * ((ids >= 0) & (ids < rows))[..., None])


class SummedModule(nn.Module):
    """A module of which each process computes a part of a sum, such as the experts of a layer."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("part"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return summed(self.part(*args, **kwargs))


class SplitEnds:
    """The embeddings of a shared model and its output head."""

    def __init__(self, model: PreTrainedModel):
        self._model = model

    def whole(self) -> Embeddings | None:
        """Return the whole matrices, which all processes have to ask for together; None if these are not matrices."""
        embed, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        if not isinstance(head, GatheredLinear):
            return embeddings_of(self._model)
        first, tied = embed.weight.detach(), embed.weight is head.part.weight
        if isinstance(embed, SplitEmbedding):
            first = gathered_columns(first.T, embed.vocab).T
        last = first if tied else gathered_columns(head.part.weight.detach().T, head.width).T
        return Embeddings(first, last, self._model.config.get_text_config())


def settle(model: PreTrainedModel) -> None:
    """Make a model that Transformers has shared among processes an ordinary one, with this process's part of it."""
    plan, known = model.tp_plan, dict[int, nn.Parameter]()
    for name, module in list(model.named_modules()):
        style, shape = plan.get(pattern(name), ""), _shape(module)
        if style:
            vars(module).pop("forward", None)
        for key, weight in module.named_parameters(recurse=False):
            if hasattr(weight, "to_local"):  # tied weights stay one tensor
                if id(weight) not in known:
                    known[id(weight)] = nn.Parameter(_own(weight.to_local()), requires_grad=False)
                module.register_parameter(key, known[id(weight)])
        if (made := _joined(module, style, shape)) is not module:
            model.set_submodule(name, made)
    # What refers to the group of processes cannot be copied.
    model._device_mesh = model._mesh_manager = model._tp_size = None
    model._is_distributed_loading_by_transformers = False
    del model.config.distributed_config


def pattern(name: str) -> str:
    """Return the name of a module as plans have it, with a star for every number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _own(part: Tensor) -> Tensor:
    """Return a part of a weight that does not keep the whole weight in memory."""
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part


def _shape(module: nn.Module) -> torch.Size:
    """Return the shape of the whole weight of a module."""
    return getattr(module, "weight", torch.empty(0)).shape


def _joined(module: nn.Module, style: str, shape: torch.Size) -> nn.Module:
    """Return a module that puts the results of all processes together; `shape` is that of the whole weight."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
        if style.startswith("rowwise"):
            return SummedLinear(module, style != "rowwise")
        return GatheredLinear(module, shape[0]) if style in ("colwise_gather_output", "colwise_rep") else module
    if isinstance(module, nn.Embedding) and style == "embedding_rowwise":
        return SplitEmbedding(module, shape[0])
    return SummedModule(module) if style == "moe_tp_experts" else module
