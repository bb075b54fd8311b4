"""Parts shared by the commands: the application, error reports, model loading and traces."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from outpace.api import demo_weights
from outpace.cli import checks
from outpace.errors import OutpaceError, UnsupportedModel, UsageError
from outpace.models.tensor_parallel import torchrun
from outpace.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from outpace.api.model import Model
    from outpace.tracing.trace import TraceWriter

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
stderr = Console(stderr=True, quiet=torchrun.rank() > 0)
DEFAULT_MODEL = "smollm2-135m-instruct"
INTERRUPTED = 130
MIN_REPORTED_SECONDS = 3.0  # seconds; shorter compilations are not reported
Command = TypeVar("Command", bound=Callable[..., None])


def reports_errors(command: Command) -> Command:
    """Turn an expected error into one line and an exit code."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except OutpaceError as error:
            _report(error)
            raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None
        except KeyboardInterrupt:
            stderr.print("interrupted")
            raise typer.Exit(INTERRUPTED) from None

    return run  # type: ignore[return-value]


def _report(error: OutpaceError) -> None:
    """Print an error. The processes of a tensor-parallel model say what the first of them does not know."""
    rank = torchrun.rank()
    if rank and isinstance(error, UsageError | UnsupportedModel):
        return
    who = f"process {rank}: " if rank else ""
    # Escaped, because rich would drop the brackets of "pip install 'outpace[shelf]'".
    Console(stderr=True).print(f"[red]error:[/] {who}{escape(str(error))}", highlight=False, soft_wrap=True)


def shares_model(command: Command) -> Command:
    """Let several processes run a command: those that torchrun has started, or as many as the user asks for."""

    @wraps(command)
    def run(*args: Any, tensor_parallel: int | None = None, **kwargs: Any) -> None:
        there = torchrun.size()
        if there == 1 and tensor_parallel is not None and tensor_parallel > 1:
            from outpace.cli.processes import start

            start(tensor_parallel)
        else:
            command(*args, tensor_parallel=tensor_parallel or (there if there > 1 else None), **kwargs)

    return run  # type: ignore[return-value]


def pairs(given: list[str]) -> dict[str, Any]:
    """Parse name=value pairs; a value that is not JSON is text."""
    out: dict[str, Any] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"{pair!r} is not in the form name=value")
        try:
            out[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            out[name.strip()] = value
    return out


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outpace {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = (
        False
    ),
) -> None:
    """Run the open-weight models that you already use, faster, with proof that the answers do not change."""


class Loading(NamedTuple):
    """How to load the models of a command."""

    dtype: str | None = None
    device: str | None = None
    bitwise: bool | None = None
    compile: bool | None = None
    quantize: str | None = None
    quantize_draft: str | None = None
    adapter: str | None = None
    tensor_parallel: int | None = None

    def check(self, model: str, draft: str | None = None) -> None:
        """Refuse invalid values before anything is imported or loaded."""
        checks.model(model)
        checks.dtype(self.dtype)
        checks.device(self.device)
        checks.quantize(self.quantize)
        checks.adapter(self.adapter)
        if model.endswith(".gguf") and (self.dtype or self.quantize or self.adapter or self.compile is not None):
            raise UsageError(
                "--dtype, --quantize, --adapter, --compile and training do not work with a GGUF file: use a "
                "Transformers model"
            )
        if draft is not None:
            self.draft.check(draft)
        elif self.quantize_draft is not None:
            raise UsageError("--quantize-draft needs a draft model: add --draft MODEL")

    @property
    def draft(self) -> Loading:
        """The same for a draft model: without the adapter, in one process, and not bitwise: its tokens are verified."""
        quantize = self.quantize_draft or self.quantize
        return self._replace(bitwise=None, quantize=quantize, quantize_draft=None, adapter=None, tensor_parallel=None)


def load_model(name: str, how: Loading) -> Model:
    """Load a model, compile it where that pays, and report a long compilation."""
    from outpace.api.load import load

    if not name.endswith(".gguf"):
        _quiet_libraries()
    if name in demo_weights.DEMO_MODELS:
        demo_weights.fetch(name)  # shows its own progress, if it downloads
    with stderr.status(f"loading {name}"):
        model = load(
            name, dtype=how.dtype, device=how.device, bitwise=how.bitwise, compile=how.compile, quantize=how.quantize,
            adapter=how.adapter, tensor_parallel=how.tensor_parallel,
        )  # fmt: skip
    gc.enable()  # it was off while modules were imported
    spent = getattr(getattr(model.lm, "runner", None), "compile_seconds", 0.0)
    if spent >= MIN_REPORTED_SECONDS:
        stderr.print(f"[dim]Compiled {name} in {spent:.0f} s (cached for next time; --no-compile skips compilation)[/]")
    return model


def _quiet_libraries() -> None:
    import torch  # noqa: F401 (which resets the levels of its own loggers when it is imported)
    from transformers.utils import logging as transformers

    transformers.disable_progress_bar()
    transformers.set_verbosity_error()
    # Transformers imports torchao with any model, and it tells of its parts for other GPUs.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def load_draft(name: str | None, how: Loading) -> Model | None:
    """Load the draft model, if there is one; `how` is for its target."""
    return None if name is None else load_model(name, how.draft)


def state_memory(model: Model, tokens: int, requests: int = 1) -> None:
    """Print the most memory that requests of `tokens` tokens take, and what would fit."""
    if (need := model.memory(tokens, requests)) is not None:
        stderr.print(f"[dim]{need}[/]", highlight=False, soft_wrap=True)


def tracing(path: Path | None, lm: Model, probs: bool = False) -> AbstractContextManager[TraceWriter | None]:
    """Open a trace writer for this file; without a path, None."""
    from outpace.tracing.trace import TraceWriter

    return TraceWriter(path, lm.tokenizer, lm.name, probs) if path is not None else nullcontext()
