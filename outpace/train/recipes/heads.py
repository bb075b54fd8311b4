"""Recipes: what is trained, and on which loss. The loop knows nothing else of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from outpace import registry
from outpace.api.model import Model
from outpace.errors import UsageError, unknown
from outpace.heads import store
from outpace.heads.base import ChainStepOutput, Head
from outpace.heads.torch_compile import compile_modules
from outpace.models.hf.module import decoder_layers
from outpace.train.data.batches import Batch
from outpace.train.data.records import TextRecord
from outpace.train.losses import LOSSES, Loss, LossResult, StepLogits
from outpace.train.settings import HEADS, TrainingSettings
from outpace.train.target import Target, answered, cooled


class ServedModel(NamedTuple):
    """How what has been trained so far is run."""

    model: Model
    settings: dict[str, Any]  # of its `generate`


class Recipe(Protocol):
    """What is trained."""

    def parameters(self) -> list[nn.Parameter]:
        """Those that change; in float32."""

    def loss(self, batch: Batch, step: int, total: int) -> LossResult:
        """On a batch, at one of so many steps."""

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """What users load."""

    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint needs."""

    def restore(self, state: dict[str, Tensor]) -> None: ...

    def serve(self) -> ServedModel:
        """For the engine, which measures how good it is."""


def build(settings: TrainingSettings, model: Model, records: Seq[TextRecord]) -> Recipe:
    """The recipe of a kind, for this target and these texts."""
    from outpace.train.recipes.whole import DraftRecipe, LayerSkipRecipe

    if settings.kind in HEADS:
        return HeadRecipe(settings, model, records)
    kinds: dict[str, type[LayerSkipRecipe] | type[DraftRecipe]] = {"layerskip": LayerSkipRecipe, "draft": DraftRecipe}
    return kinds[settings.kind](settings, model, records)


def loss_of(settings: TrainingSettings) -> Loss:
    if settings.loss not in LOSSES:
        raise unknown("loss", settings.loss, LOSSES)
    return LOSSES[settings.loss]


def computing(device: torch.device, dtype: torch.dtype, bf16: bool | None) -> AbstractContextManager[None]:
    """In bfloat16 if asked to, on a GPU, or where the target is in 16 bits and its matrices are used."""
    wanted = bf16 if bf16 is not None else device.type == "cuda" or dtype.itemsize < 4
    if not wanted and dtype.itemsize < 4:
        raise UsageError(f"the model is in {str(dtype).removeprefix('torch.')}: load it in float32, or leave bf16 on")
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted)


def frequent(records: Seq[TextRecord], count: int, vocab: int) -> Tensor:  # [count], sorted
    """The tokens that answers have most often; where there are too few, the first ones of the vocabulary."""
    if count > vocab:
        raise UsageError(f"a draft vocabulary of {count} tokens is larger than the target's, {vocab}")
    said = torch.zeros(vocab, dtype=torch.long)
    for record in records:
        said += torch.bincount(record.tokens[record.prompt :], minlength=vocab)
    return said.sort(descending=True, stable=True).indices[:count].sort().values


class HeadRecipe:
    """A head of any kind, on the hidden states and the distribution of a target that stays as it is."""

    def __init__(self, settings: TrainingSettings, model: Model, records: Seq[TextRecord]):
        self.settings, self.model, self.lm = settings, model, model.lm
        self.target, self.measure = Target(model.lm), loss_of(settings)
        self.head = self._started(records)
        self.ahead = settings.ahead or self.head.spec.steps
        dtype = self.target.model.dtype
        for parameter in self.parameters():  # not those that are the target's
            parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
        self.computing = computing(self.target.device, dtype, settings.bf16)
        compile_modules(self.head.pieces(), self.target.device)

    def _started(self, records: Seq[TextRecord]) -> Head:
        given, kind = self.settings, self.settings.kind
        ids = None
        if given.draft_vocab and given.draft_vocab != self.lm.vocab:
            ids = frequent(records, given.draft_vocab, self.lm.vocab).to(self.target.device)
        sizes = {name: size for name, size in (("steps", given.ahead), ("layers", given.layers)) if size}
        if given.start:
            head = store.load(Path(given.start), self.lm)
            if head.spec.kind != kind:
                raise UsageError(f"the head in {given.start} is of the kind {head.spec.kind!r}, not {kind!r}")
            changed = given.head | {"layers": given.layers or head.spec.layers}
            return store.grown(head, self.lm, ids if given.draft_vocab else head.ids, **changed)
        head = store.fresh(kind, self.lm, ids, **sizes, **given.head)
        if head.like_target and given.inherit:
            _inherit(head, self.target)
        return head

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.head.parameters() if parameter.requires_grad]

    def loss(self, batch: Batch, step: int, total: int) -> LossResult:
        told = self.target.tell(batch.tokens, self.head.spec.taps)
        assert told.hidden is not None
        counts, wanted = answered(batch), cooled(told.logits, self.settings.temperature)
        started = counts
        if self.head.ids is not None:  # where the target wants a token that the head does not have, nothing is learnt
            counts = counts & torch.isin(told.logits.argmax(-1), self.head.ids)
            wanted = wanted[..., self.head.ids]
        with self.computing:
            guessed = self.head.unroll(batch.tokens, told.hidden, self.ahead, started)
            distributions = self._distributions(guessed, wanted, started, counts)
        return self.measure(distributions)

    def _distributions(
        self, guessed: list[ChainStepOutput], wanted: Tensor, started: Tensor, counts: Tensor
    ) -> list[StepLogits]:
        """Every column with the target's distribution that it guesses, at each step, of the chains that start in an
        answer."""
        batch, length, vocab = wanted.shape
        rows = torch.arange(batch, device=wanted.device)[:, None] * length  # of all texts, one after the other
        chains: Tensor | None = None
        steps = []
        for guess in guessed:
            behind, inside = (rows + guess.at.clamp(max=length - 1)).flatten(), (guess.at < length).flatten()
            chains = (started.flatten()[behind] & inside).nonzero().flatten() if chains is None else chains
            draft = cooled(guess.output(guess.states.flatten(0, 1)[chains]), self.settings.temperature)
            counted = inside & counts.flatten()[behind]
            steps.append(StepLogits(draft, wanted.reshape(-1, vocab), counted[chains], behind[chains]))
        return steps

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        store.save(self.head, folder, self.lm, notes)

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.head.own().items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.head.load_state_dict(state, strict=False)

    def serve(self) -> ServedModel:
        """With the weights as they would be saved."""
        own = {n: t.half() if t.is_floating_point() else t for n, t in self.head.own().items()}
        head = store.made(self.head.spec, own, self.lm)
        return ServedModel(
            self.model, {"method": registry.method(self.settings.kind, head=head, **self.settings.option)}
        )


@torch.no_grad()
def _inherit(head: Head, target: Target) -> None:
    """Start from the target's last layers, where names and shapes are the same."""
    decoder, name = decoder_layers(target.model)
    theirs = dict(decoder.named_parameters())
    first = len(getattr(decoder, name)) - head.spec.layers
    for path, ours in head.named_parameters():
        if not ours.requires_grad:
            continue
        _, stack, *parts = path.split(".")  # the name of the decoder, and of what it has
        given = theirs.get(".".join([name, str(first + int(parts[0])), *parts[1:]])) if stack == "layers" else None
        if given is not None and given.shape == ours.shape:
            ours.copy_(given)
