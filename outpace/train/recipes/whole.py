"""Recipes that train whole models: a copy of the target with early exits, and a smaller draft model."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outpace import registry
from outpace.api.load import load, wrap
from outpace.api.model import Model
from outpace.core.lm import layers_of
from outpace.cross_tokenizer.by_tokens import NamedModel, translated
from outpace.drafting.layer_search import LayerProbe, ProbeText, parse, without
from outpace.errors import UnsupportedModel, UsageError
from outpace.heads.torch_compile import compile_modules
from outpace.models.adapters import has_adapter
from outpace.models.hf import checkpoint
from outpace.models.hf.module import decoder_layers, twin
from outpace.models.quantized import quantized_layers
from outpace.train.data.batches import Batch
from outpace.train.data.records import TextRecord
from outpace.train.losses import LossResult, StepLogits, alpha
from outpace.train.recipes import exits
from outpace.train.recipes.heads import ServedModel, autocast, loss_of
from outpace.train.settings import TrainingSettings
from outpace.train.target import Target, answer_mask, module_of, with_temperature

SAMPLES, LONGEST = 8, 256  # texts, and tokens of each, used to choose which layers to remove


class TrainedModel:
    """A model that is trained beside the frozen target."""

    def __init__(self, settings: TrainingSettings, model: Model, trained: PreTrainedModel):
        """Copy `trained`, which may share tensors with the target."""
        self.settings, self.model = settings, model
        self.target, self.measure = Target(model.lm), loss_of(settings)
        if any(quantized_layers(trained)) or has_adapter(trained):
            raise UnsupportedModel(
                "a quantised model, or one with an adapter, cannot be trained: load the plain model, without `quantize`"
            )
        self.saved = checkpoint.smallest_dtype(trained)
        own = copy.deepcopy(trained).eval().requires_grad_(True)
        self.trained: PreTrainedModel = own.to(torch.promote_types(own.dtype, torch.float32))
        self.autocast = autocast(self.target.device, self.trained.dtype, settings.bf16)
        # Runs on the trained tensors themselves, so it always has the current weights.
        self.served = wrap(self.trained, model.tokenizer, name=model.name, compile=False)
        self.fit = twin(self.trained)
        decoder, name = decoder_layers(self.fit)
        compile_modules(getattr(decoder, name), self.target.device)

    def parameters(self) -> list[nn.Parameter]:
        return list(self.trained.parameters())

    def target_logits(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows and columns of the tokens that count, and the target's logits there."""
        # [positions] x 2, [positions, vocab]
        rows, at = answer_mask(batch).nonzero(as_tuple=True)
        return rows, at, with_temperature(self.target.forward(batch.tokens).logits[rows, at], self.settings.temperature)

    def loss_of_logits(self, logits: Tensor, target: Tensor) -> LossResult:  # [positions, vocab]
        """Compute the loss on the tokens that both have: models of one family pad their vocabulary differently."""
        shared = min(logits.shape[-1], target.shape[-1])
        draft = with_temperature(logits, self.settings.temperature)[:, :shared]
        return self.measure([StepLogits(draft, target[:, :shared])])

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """Write a regular checkpoint; each file appears complete or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            checkpoint.converted(self.trained, self.saved).save_pretrained(place)
            if (tokenizer := self.model.tokenizer) is not None:
                tokenizer.save_pretrained(place)  # type: ignore[attr-defined]
            lines = [f"- {name}: {value}" for name, value in notes.items()]
            about = f"# Trained from {self.model.name} with `outpace train {self.settings.kind}`\n\n"
            (Path(place) / "README.md").write_text(about + "\n".join(lines) + "\n", encoding="utf-8")
            for file in Path(place).iterdir():
                os.replace(file, folder / file.name)

    def state(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu().clone() for name, p in self.trained.named_parameters()}

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self.trained.named_parameters():
            parameter.copy_(state[name])


class LayerSkipRecipe(TrainedModel):
    """Trains a copy of the target with layer dropout, in which every exit learns the target's distribution."""

    def __init__(self, settings: TrainingSettings, model: Model, records: Seq[TextRecord]):
        super().__init__(settings, model, module_of(model.lm))
        self.exits = exits.Exits(self.fit)
        self.layer_count = len(self.exits.layers)
        self.method = registry.method("layerskip", **settings.option)
        self.exit = settings.option.get("exit") or max(1, self.layer_count // 4)
        if not isinstance(self.exit, int) or self.exit >= self.layer_count or settings.option.get("skip"):
            raise UsageError(f"layerskip trains one exit: set exit to a number below {self.layer_count}, without skip")

    def loss(self, batch: Batch, step: int, total: int) -> LossResult:
        rows, at, target = self.target_logits(batch)
        ramp = exits.ramped(step, total) if self.settings.ramp else 1.0
        probs = exits.probs(self.layer_count, self.settings.dropout, ramp)
        dropped = torch.rand(self.layer_count, len(batch.tokens)) < probs[:, None]  # [layers, batch]
        loss, logits = torch.zeros((), device=target.device), dict[int, Tensor]()
        with self.autocast:
            left = self.exits.run(batch.tokens, dropped.to(target.device))
            for layer, weight in self.weights(step, total).items():
                logits[layer] = self.exits.logits(left[layer][rows, at])
                loss = loss + weight * self.loss_of_logits(logits[layer], target).loss
            with torch.no_grad():
                draft = logits.get(self.exit - 1)
                draft = self.exits.logits(left[self.exit - 1][rows, at]) if draft is None else draft
                agreed = alpha(draft, logits[self.layer_count - 1]).mean()
        return LossResult(loss, agreed[None])

    def weights(self, step: int, total: int) -> dict[int, float]:
        """Return the weight of each exit at this step."""
        given = self.settings
        if given.curriculum == "single":
            return {
                self.exit - 1: given.exit_scale / (1 + given.exit_scale),
                self.layer_count - 1: 1 / (1 + given.exit_scale),
            }
        if given.curriculum == "rotational":
            active = exits.rotational(step, self.layer_count, given.rotation)
        else:
            active = exits.gradual(step, self.layer_count, total)
        return exits.weights(active, self.layer_count, given.exit_scale)

    def serve(self) -> ServedModel:
        self.served.clear_cache()  # cached prompts were computed with earlier weights
        return ServedModel(self.served, {"method": self.method})


class DraftRecipe(TrainedModel):
    """Trains a smaller model, or the target without some of its layers, on the target's distribution."""

    def __init__(self, settings: TrainingSettings, model: Model, records: Seq[TextRecord]):
        super().__init__(settings, model, _student(settings, model, records))
        self.method = registry.method("draft", draft=self.served.lm, **settings.option)

    def loss(self, batch: Batch, step: int, total: int) -> LossResult:
        rows, at, target = self.target_logits(batch)
        with self.autocast:
            logits = self.fit(input_ids=batch.tokens, use_cache=False).logits
        return self.loss_of_logits(logits[rows, at], target)

    def serve(self) -> ServedModel:
        self.served.clear_cache()
        return ServedModel(self.model, {"method": self.method})


def _student(settings: TrainingSettings, model: Model, records: Seq[TextRecord]) -> PreTrainedModel:
    given = [settings.draft, settings.remove, settings.keep]
    if sum(map(bool, given)) != 1:
        raise UsageError("set exactly one of draft= (a model), remove= and keep= (the target without some layers)")
    target = module_of(model.lm)
    if settings.draft:
        device = target.get_input_embeddings().weight.device
        student = load(settings.draft, dtype=torch.float32, device=device, compile=False)
        sides = (NamedModel(m.lm, m.tokenizer, m.name) for m in (model, student))
        if translated(*sides) is not student.lm:
            raise UsageError(
                f"{settings.draft} has a different tokenizer than {model.name}, so it cannot learn its distribution"
            )
        return module_of(student.lm)
    if settings.keep:
        return checkpoint.part_of(target, sorted(set(parse(settings.keep))))
    if settings.remove >= layers_of(model.lm).count:
        raise UsageError(f"remove={settings.remove} leaves no layer: {model.name} has {layers_of(model.lm).count}")
    texts = [ProbeText(record.tokens[:LONGEST].tolist()) for record in records[:SAMPLES]]
    gone = LayerProbe(model.lm, texts).block(settings.remove)
    return checkpoint.part_of(target, without(layers_of(model.lm).count, gone))
