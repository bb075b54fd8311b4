"""Settings of a training run: one dataclass, filled from flags, a YAML file, or both (flags win)."""

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
    """A kind of training."""

    about: str
    lr: float  # default learning rate


KINDS: dict[str, TrainingKind] = {
    "eagle3": TrainingKind(
        "A layer that predicts from three of the target's hidden states, and from its own output for later tokens.",
        3e-4,
    ),
    "mtp": TrainingKind(
        "A layer like the target's that predicts from its last hidden state, and from its own output for later tokens.",
        3e-4,
    ),
    "medusa": TrainingKind("One small head for each token ahead, on the target's last hidden state.", 1e-3),
    "block": TrainingKind("A few layers that predict a whole block of tokens in one pass.", 3e-4),
    "layerskip": TrainingKind(
        "A copy of the model whose first layers learn to predict the output of all layers.", 3e-5
    ),
    "draft": TrainingKind("A smaller model, or this one without some layers, that learns to draft for it.", 1e-4),
}
HEADS = ("eagle3", "mtp", "medusa", "block")
CHANGEABLE = ("steps", "save_every", "validate_every", "patience", "device")  # when a run is resumed


def setting(default: Any, about: str, *kinds: str) -> Any:
    """Define a setting with its help text, and the kinds that have it if not all do."""
    given: dict[str, Any] = {"default_factory": dict} if default is dict else {"default": default}
    return field(**given, metadata={"help": about, "kinds": kinds})


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings of one training run."""

    kind: str
    model: str = setting("", "The target: shelf name, folder or hub id.")
    data: tuple[str, ...] = setting((), "Files of `outpace train data`.")
    output: str = setting("", "The folder to write to.")
    dtype: str = setting("", "Data type of the target: float32, bfloat16, ...; default: float32 on a CPU.")
    device: str = setting("", "Device: cpu, cuda, cuda:1, ...")

    loss: str = setting("kl", "Loss: ce, kl, tv, nla, mixed or e2e (docs/training/data.md).")
    temperature: float = setting(1.0, "Temperature at which the two distributions are compared.")
    ahead: int = setting(
        0, "Tokens ahead that the head learns to predict at each position; 0: as many as it is made for.", *HEADS
    )
    draft_vocab: int = setting(
        0, "Limit the draft vocabulary to the N most frequent tokens of the answers; 0: full vocabulary.", *HEADS
    )
    layers: int = setting(0, "Layers of the head; 0: as many as its kind has.", *HEADS)
    start: str = setting(
        "", "Continue from the head in this folder; layers, draft vocabulary and head settings may change.", *HEADS
    )
    inherit: bool = setting(True, "Start from the target's last layers, where names and shapes match.", "mtp")
    head: dict[str, Any] = setting(  # noqa: RUF009
        dict, "Another setting of the head, as name=value: normed=true, linked=768, ...", *HEADS
    )

    dropout: float = setting(
        0.1, "Probability that a text skips the last layer; earlier layers are skipped less often.", "layerskip"
    )
    ramp: bool = setting(
        False, "Skip layers more and more often over the run: for a model trained from scratch.", "layerskip"
    )
    exit_scale: float = setting(0.2, "Weight of the exits relative to the last layer.", "layerskip")
    curriculum: str = setting(
        "rotational", "Which exits are trained: rotational, gradual, or the single one in -o exit=.", "layerskip"
    )
    rotation: int = setting(8, "rotational: each exit is trained at one step in N.", "layerskip")

    draft: str = setting(
        "", "The model to train: shelf name, folder or hub id; default: the target without some layers.", "draft"
    )
    remove: int = setting(
        0, "Number of the target's layers to remove: the block that rotates its input least.", "draft"
    )
    keep: str = setting("", "Or exactly the layers to keep, as 0-8+15-29.", "draft")

    steps: int = setting(1000, "Updates of the weights.")
    lr: float = setting(0.0, "Learning rate; 0: the default of the kind.")
    schedule: str = setting("cosine", "Learning rate after the warm-up: cosine (down to a tenth) or constant.")
    warmup: int = setting(-1, "Steps until the learning rate is reached; -1: 3 % of all.")
    clip: float = setting(0.5, "Maximum norm of the gradient.")
    weight_decay: float = setting(0.0, "Weight decay of AdamW.")
    batch: int = setting(2048, "Tokens per batch, padding included, over all processes.")
    accumulate: int = setting(1, "Batches whose gradients make one update.")
    length: int = setting(1024, "Maximum tokens of a text; longer texts are cut off.")
    seed: int = setting(0, "Random seed: the same seed gives the same run.")
    bf16: bool | None = setting(None, "Compute in bfloat16, with weights in float32; default: on a GPU.")

    validation: int = setting(8, "Prompts to hold out, on which the engine measures; 0: none.")
    validate_every: int = setting(0, "Steps between measurements; 0: a tenth of all.")
    validation_tokens: int = setting(64, "Tokens of each answer in a measurement.")
    validation_temperature: float = setting(0.0, "Sampling temperature in a measurement; 0 is greedy.")
    option: dict[str, Any] = setting(  # noqa: RUF009
        dict, "An option of the method in a measurement, as name=value: depth=3, exit=8, ..."
    )
    patience: int = setting(0, "Stop after N measurements without a better one; 0: never.")
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
                raise UsageError(f"{name} must be at least {value}, got {getattr(self, name)}")
        if self.lr < 0 or self.temperature <= 0 or self.clip <= 0 or not 0 <= self.dropout < 1 or self.exit_scale < 0:
            raise UsageError(
                "lr and exit_scale must not be negative, temperature and clip must be positive, dropout in [0, 1)"
            )

    @property
    def rate(self) -> float:
        return self.lr or KINDS[self.kind].lr

    @property
    def measured_every(self) -> int:
        return self.validate_every or max(1, self.steps // 10)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings of this kind as YAML and JSON write them; `make` takes all but the kind."""
        found = {name: getattr(self, name) for name in fields_of(self.kind)}
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
        return {"kind": self.kind, **{name: value for name, value in listed.items() if value is not None}}

    def differences(self, other: TrainingSettings) -> list[str]:
        """Return the settings that differ, but must not when a run is resumed."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in CHANGEABLE]
        return [name for name in names if getattr(self, name) != getattr(other, name)]


def fields_of(kind: str) -> dict[str, dataclasses.Field[Any]]:
    """Return the settings that a kind has, by name."""
    every = {f.name: f for f in dataclasses.fields(TrainingSettings) if f.name != "kind"}
    return {name: f for name, f in every.items() if not f.metadata["kinds"] or kind in f.metadata["kinds"]}


def make(kind: str, given: Mapping[str, Any]) -> TrainingSettings:
    """Build settings from names and values; for an unknown name, the error suggests the nearest one of this kind."""
    known, hints = fields_of(kind) if kind in KINDS else {}, typing.get_type_hints(TrainingSettings)
    if not known:
        raise unknown("kind of training", kind, KINDS)
    for name in given:
        if name not in known:
            raise unknown(f"setting of {kind}", name, known)
    return TrainingSettings(kind=kind, **{name: _typed(name, value, hints[name]) for name, value in given.items()})


def read(path: Path) -> dict[str, Any]:
    """Read names and values from a YAML file."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise OutpaceError("settings in YAML need PyYAML: pip install 'outpace[train]'") from error
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read the settings in {str(path)!r}: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UsageError(f"{str(path)!r} holds no settings: write one `name: value` per line")
    return found


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def _typed(name: str, value: Any, kind: Any) -> Any:
    """Convert a value to the type of its field: YAML reads 3e-4 as text, and has lists where a field is a tuple."""
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
