"""Training recipes: what is trained, and on which loss. The loop uses only the `Recipe` protocol."""

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
from outpace.train.target import Target, answer_mask, with_temperature


class ServedModel(NamedTuple):
    """How the engine runs the weights trained so far."""

    model: Model
    settings: dict[str, Any]  # arguments of `generate`


class Recipe(Protocol):
    """What the loop needs of anything that is trained."""

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters, in float32."""

    def loss(self, batch: Batch, step: int, total: int) -> LossResult:
        """Compute the loss of a batch at step `step` of `total`."""

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """Write the result in the form that users load."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint needs."""

    def restore(self, state: dict[str, Tensor]) -> None: ...

    def serve(self) -> ServedModel:
        """Return the current weights as the engine runs them, to measure how good they are."""


def build(settings: TrainingSettings, model: Model, records: Seq[TextRecord]) -> Recipe:
    """Build the recipe of the settings' kind for this target and these texts."""
    from outpace.train.recipes.whole import DraftRecipe, LayerSkipRecipe

    if settings.kind in HEADS:
        return HeadRecipe(settings, model, records)
    kinds: dict[str, type[LayerSkipRecipe] | type[DraftRecipe]] = {"layerskip": LayerSkipRecipe, "draft": DraftRecipe}
    return kinds[settings.kind](settings, model, records)


def loss_of(settings: TrainingSettings) -> Loss:
    if settings.loss not in LOSSES:
        raise unknown("loss", settings.loss, LOSSES)
    return LOSSES[settings.loss]


def autocast(device: torch.device, dtype: torch.dtype, bf16: bool | None) -> AbstractContextManager[None]:
    """Autocast to bfloat16: as `bf16` says; if None, on a GPU or where matrices of a 16-bit target are used."""
    wanted = bf16 if bf16 is not None else device.type == "cuda" or dtype.itemsize < 4
    if not wanted and dtype.itemsize < 4:
        raise UsageError(
            f"the model is in {str(dtype).removeprefix('torch.')} and bf16 is off: load it in float32, or leave bf16 on"
        )
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted)


def frequent(records: Seq[TextRecord], count: int, vocab: int) -> Tensor:  # [count], sorted
    """Return the most frequent tokens of the answers, filled up with the first tokens of the vocabulary."""
    if count > vocab:
        raise UsageError(f"a draft vocabulary of {count} tokens is larger than the target's, {vocab}")
    counts = torch.zeros(vocab, dtype=torch.long)
    for record in records:
        counts += torch.bincount(record.tokens[record.prompt :], minlength=vocab)
    return counts.sort(descending=True, stable=True).indices[:count].sort().values


class HeadRecipe:
    """Trains a head of any kind on the hidden states and the distribution of a frozen target."""

    def __init__(self, settings: TrainingSettings, model: Model, records: Seq[TextRecord]):
        self.settings, self.model, self.lm = settings, model, model.lm
        self.target, self.measure = Target(model.lm), loss_of(settings)
        self.head = self._started(records)
        self.ahead = settings.ahead or self.head.spec.steps
        dtype = self.target.model.dtype
        for parameter in self.parameters():  # without tensors shared with the target
            parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
        self.autocast = autocast(self.target.device, dtype, settings.bf16)
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
                raise UsageError(f"the head in {given.start} is of kind {head.spec.kind!r}, not {kind!r}")
            changed = given.head | {"layers": given.layers or head.spec.layers}
            return store.extended(head, self.lm, ids if given.draft_vocab else head.ids, **changed)
        head = store.fresh(kind, self.lm, ids, **sizes, **given.head)
        if head.like_target and given.inherit:
            _inherit(head, self.target)
        return head

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.head.parameters() if parameter.requires_grad]

    def loss(self, batch: Batch, step: int, total: int) -> LossResult:
        outputs = self.target.forward(batch.tokens, self.head.spec.taps)
        assert outputs.hidden is not None
        counts, wanted = answer_mask(batch), with_temperature(outputs.logits, self.settings.temperature)
        started = counts
        if self.head.ids is not None:  # positions whose likeliest token is not in the draft vocabulary do not count
            counts = counts & torch.isin(outputs.logits.argmax(-1), self.head.ids)
            wanted = wanted[..., self.head.ids]
        with self.autocast:
            predicted = self.head.unroll(batch.tokens, outputs.hidden, self.ahead, started)
            distributions = self._distributions(predicted, wanted, started, counts)
        return self.measure(distributions)

    def _distributions(
        self, predicted: list[ChainStepOutput], wanted: Tensor, started: Tensor, counts: Tensor
    ) -> list[StepLogits]:
        """Pair each column with the target's distribution that it predicts, at each step, for the chains that start
        in an answer."""
        batch, length, vocab = wanted.shape
        offsets = torch.arange(batch, device=wanted.device)[:, None] * length  # of the texts, one after the other
        chains: Tensor | None = None
        steps = []
        for step in predicted:
            at, inside = (offsets + step.at.clamp(max=length - 1)).flatten(), (step.at < length).flatten()
            chains = (started.flatten()[at] & inside).nonzero().flatten() if chains is None else chains
            draft = with_temperature(step.output(step.states.flatten(0, 1)[chains]), self.settings.temperature)
            counted = inside & counts.flatten()[at]
            steps.append(StepLogits(draft, wanted.reshape(-1, vocab), counted[chains], at[chains]))
        return steps

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        store.save(self.head, folder, self.lm, notes)

    def state(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.head.own_tensors().items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.head.load_state_dict(state, strict=False)

    def serve(self) -> ServedModel:
        """Return the head with its weights as they would be saved."""
        own = {n: t.half() if t.is_floating_point() else t for n, t in self.head.own_tensors().items()}
        head = store.made(self.head.spec, own, self.lm)
        return ServedModel(
            self.model, {"method": registry.method(self.settings.kind, head=head, **self.settings.option)}
        )


@torch.no_grad()
def _inherit(head: Head, target: Target) -> None:
    """Initialise the head from the target's last layers, where names and shapes match."""
    decoder, name = decoder_layers(target.model)
    theirs = dict(decoder.named_parameters())
    first = len(getattr(decoder, name)) - head.spec.layers
    for path, ours in head.named_parameters():
        if not ours.requires_grad:
            continue
        _, stack, *parts = path.split(".")  # the decoder, its attribute, then the layer's index and the rest
        given = theirs.get(".".join([name, str(first + int(parts[0])), *parts[1:]])) if stack == "layers" else None
        if given is not None and given.shape == ours.shape:
            ours.copy_(given)
