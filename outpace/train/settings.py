"""Settings of a training run: one record, from flags, from one YAML file, or from both; then flags win."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from outpace.errors import OutpaceError, UsageError, unknown

SCHEDULES = ("cosine", "constant")
CURRICULA = ("rotational", "gradual", "single")


class TrainingKind(NamedTuple):
    """Something that can be trained."""

    about: str
    lr: float  # unless told otherwise


KINDS: dict[str, TrainingKind] = {
    "eagle3": TrainingKind("A layer that guesses from three of the target's hidden states, fed back to itself.", 3e-4),
    "mtp": TrainingKind(
        "A layer like the target's own that guesses from its last hidden state, fed back to itself.", 3e-4
    ),
    "medusa": TrainingKind("One small head for each token ahead, on the target's last hidden state.", 1e-3),
    "block": TrainingKind("A few layers that guess a whole block of tokens in one pass.", 3e-4),
    "layerskip": TrainingKind("A copy of the model whose first layers learn to guess what all of them say.", 3e-5),
    "draft": TrainingKind("A smaller model, or this one without some layers, that learns to guess for it.", 1e-4),
}
HEADS = ("eagle3", "mtp", "medusa", "block")
CHANGEABLE = ("steps", "save_every", "validate_every", "patience", "device")  # when a run is taken up again


def setting(default: Any, about: str, *kinds: str) -> Any:
    """A setting with what it does, and the kinds that have it if not all do."""
    given: dict[str, Any] = {"default_factory": dict} if default is dict else {"default": default}
    return field(**given, metadata={"help": about, "kinds": kinds})


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """One training run."""

    kind: str
    model: str = setting("", "The target: shelf name, folder or hub id.")
    data: tuple[str, ...] = setting((), "Files of `outpace train data`.")
    output: str = setting("", "The folder to write to.")
    dtype: str = setting("", "Of the target: float32, bfloat16, ...; default: float32 on a CPU.")
    device: str = setting("", "cpu, cuda, cuda:1, ...")

    loss: str = setting("kl", "ce, kl, tv, nla, mixed or e2e (docs/training/data.md).")
    temperature: float = setting(1.0, "At which the two distributions are compared.")
    ahead: int = setting(
        0, "Tokens ahead that each place is trained to guess; 0: as many as the head is made for.", *HEADS
    )
    draft_vocab: int = setting(0, "Guess only the so many most frequent tokens of the answers; 0: all.", *HEADS)
    layers: int = setting(0, "Layers of the head; 0: as many as its kind has.", *HEADS)
    start: str = setting(
        "", "Go on from the head in this folder, if asked to with other layers, tokens to guess or settings.", *HEADS
    )
    inherit: bool = setting(True, "Start from the target's last layers, where names and shapes match.", "mtp")
    head: dict[str, Any] = setting(  # noqa: RUF009
        dict, "Another setting of the head, as name=value: normed=true, linked=768, ...", *HEADS
    )

    dropout: float = setting(0.1, "How often a text skips the last layer; earlier ones are skipped less.", "layerskip")
    ramp: bool = setting(False, "Let layers be skipped more and more: for a model that is trained anew.", "layerskip")
    exit_scale: float = setting(0.2, "How much exits count beside the last layer.", "layerskip")
    curriculum: str = setting(
        "rotational", "Which exits are trained: rotational, gradual, or the single one in -o exit=.", "layerskip"
    )
    rotation: int = setting(8, "rotational: each exit is trained at one of so many steps.", "layerskip")

    draft: str = setting(
        "", "The model to train: shelf name, folder or hub id; else the target without some layers.", "draft"
    )
    remove: int = setting(0, "Layers of the target to leave out: the block that turns its input least.", "draft")
    keep: str = setting("", "Or exactly the layers that stay, as 0-8+15-29.", "draft")

    steps: int = setting(1000, "Updates of the weights.")
    lr: float = setting(0.0, "Learning rate; 0: that of the kind.")
    schedule: str = setting("cosine", "After the warm-up: cosine, down to a tenth, or constant.")
    warmup: int = setting(-1, "Steps until the learning rate is reached; -1: 3 % of all.")
    clip: float = setting(0.5, "Largest norm of the gradient.")
    weight_decay: float = setting(0.0, "Of AdamW.")
    batch: int = setting(2048, "Tokens of a batch, padding included, over all processes.")
    accumulate: int = setting(1, "Batches whose gradients make one update.")
    length: int = setting(1024, "Longest text; the rest of longer ones is cut off.")
    seed: int = setting(0, "Same seed, same run.")
    bf16: bool | None = setting(None, "Compute in bfloat16, with weights in float32; default: on a GPU.")

    validation: int = setting(8, "Prompts that are held out, on which the engine measures; 0: none.")
    validate_every: int = setting(0, "Steps between measurements; 0: a tenth of all.")
    validation_tokens: int = setting(64, "Tokens of each answer then.")
    validation_temperature: float = setting(0.0, "At which they are drawn; 0 is greedy.")
    option: dict[str, Any] = setting(dict, "An option of the method then, as name=value: depth=3, exit=8, ...")  # noqa: RUF009
    patience: int = setting(0, "Stop after so many measurements without a better one; 0: never.")
    save_every: int = setting(100, "Steps between checkpoints.")

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("kind of training", self.kind, KINDS)
        for name, known in (("schedule", SCHEDULES), ("curriculum", CURRICULA)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        for f in dataclasses.fields(self):
            kinds = f.metadata.get("kinds")
            if kinds and self.kind not in kinds and getattr(self, f.name) != _default(f):
                raise UsageError(f"{f.name} is a setting of {', '.join(kinds)}, not of {self.kind}")
        least = {"steps": 1, "batch": 1, "accumulate": 1, "length": 2, "validation_tokens": 1, "save_every": 1}
        least |= dict.fromkeys(("ahead", "draft_vocab", "remove", "validation", "validate_every", "patience"), 0)
        least |= {"layers": 0, "rotation": 1, "warmup": -1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise UsageError(f"{name} is at least {value}, got {getattr(self, name)}")
        if self.lr < 0 or self.temperature <= 0 or self.clip <= 0 or not 0 <= self.dropout < 1 or self.exit_scale < 0:
            raise UsageError("lr and exit_scale are not negative, temperature and clip positive, dropout from 0 to 1")

    @property
    def rate(self) -> float:
        return self.lr or KINDS[self.kind].lr

    @property
    def measured_every(self) -> int:
        return self.validate_every or max(1, self.steps // 10)

    def to_dict(self) -> dict[str, Any]:
        """Those that this kind has, as YAML and JSON write them; `make` takes all but the kind."""
        found = {name: getattr(self, name) for name in fields_of(self.kind)}
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
        return {"kind": self.kind, **{name: value for name, value in listed.items() if value is not None}}

    def differences(self, other: TrainingSettings) -> list[str]:
        """What may not differ when a run is taken up again, and does."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in CHANGEABLE]
        return [name for name in names if getattr(self, name) != getattr(other, name)]


def fields_of(kind: str) -> dict[str, dataclasses.Field[Any]]:
    """The settings that a kind has."""
    every = {f.name: f for f in dataclasses.fields(TrainingSettings) if f.name != "kind"}
    return {name: f for name, f in every.items() if not f.metadata["kinds"] or kind in f.metadata["kinds"]}


def make(kind: str, given: Mapping[str, Any]) -> TrainingSettings:
    """Settings from names and values; an unknown name is refused with the nearest one that this kind has."""
    known, hints = fields_of(kind) if kind in KINDS else {}, typing.get_type_hints(TrainingSettings)
    if not known:
        raise unknown("kind of training", kind, KINDS)
    for name in given:
        if name not in known:
            raise unknown(f"setting of {kind}", name, known)
    return TrainingSettings(kind=kind, **{name: _typed(name, value, hints[name]) for name, value in given.items()})


def read(path: Path) -> dict[str, Any]:
    """Names and values of a YAML file."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise OutpaceError("settings in YAML need PyYAML: pip install 'outpace[train]'") from error
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read the settings in {str(path)!r}: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UsageError(f"{str(path)!r} holds no settings: write one as `name: value` on each line")
    return found


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def _typed(name: str, value: Any, kind: Any) -> Any:
    """The value as its field wants it: YAML takes 3e-4 for text, and a list for what is a tuple here."""
    wanted = typing.get_args(kind)[0] if type(None) in typing.get_args(kind) else typing.get_origin(kind) or kind
    if wanted is tuple:
        value = tuple([value] if isinstance(value, str) else value)
    elif wanted is float and isinstance(value, int | str) and not isinstance(value, bool):
        with suppress(ValueError):
            value = float(value)
    elif wanted is str and isinstance(value, Path):
        value = str(value)
    right = isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool)
    if not right and not (value is None and wanted is not kind and type(None) in typing.get_args(kind)):
        raise UsageError(f"{name}: {value!r} is not of the type {wanted.__name__}")
    return value
