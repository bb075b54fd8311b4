"""outpace train: train heads, early exits and draft models. Each kind is a command whose flags are its settings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outpace.cli.common import Loading, app, load_model, pairs, reports_errors, stderr
from outpace.cli.flags import AsJson
from outpace.cli.training.train_data import data
from outpace.errors import UsageError
from outpace.train import settings as known

if TYPE_CHECKING:
    from outpace.train.log import LogPoint
    from outpace.train.loop import Loop

train = typer.Typer(no_args_is_help=True, help="Train drafters for a model: heads, early exits and small draft models.")
app.add_typer(train, name="train")

Config = Annotated[Path | None, typer.Option(help="YAML file of settings, named like the flags; flags override it.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")]
USES = {
    "layerskip": "--model {folder} --method layerskip -o exit={exit}",
    "draft": "--method draft --draft {folder}",
}  # how to use the result


def _flag(name: str, help: str, kind: Any) -> Any:
    """Turn a setting into a command-line option; without it, the settings file or the default applies."""
    flag = f"--{name.replace('_', '-')}"
    if get_origin(kind) in (tuple, dict):
        flags = (flag, "-o") if name == "option" else (flag,)
        return Annotated[list[str], typer.Option(*flags, help=help)]
    if kind in (bool, bool | None):
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=help)]
    return Annotated[kind | None, typer.Option(flag, help=help)]


def _parameters(kind: str) -> Iterator[inspect.Parameter]:
    """Yield the flags of a kind, from its settings."""
    hints = get_type_hints(known.TrainingSettings)
    where = inspect.Parameter.KEYWORD_ONLY
    model = Annotated[str | None, typer.Argument(help="Target: demo model, folder or Hugging Face id.")]
    yield inspect.Parameter("model", where, default=None, annotation=model)
    for name, field in known.fields_of(kind).items():
        if name == "model":
            continue
        listed = get_origin(hints[name]) in (tuple, dict)
        shown = "" if listed or field.default in ("", None) else f" [default: {field.default}]"
        about = _flag(name, field.metadata["help"] + shown.replace("[", r"\["), hints[name])
        yield inspect.Parameter(name, where, default=[] if listed else None, annotation=about)
    yield inspect.Parameter("config", where, default=None, annotation=Config)
    yield inspect.Parameter("resume", where, default=False, annotation=Resume)
    yield inspect.Parameter("as_json", where, default=False, annotation=AsJson)


def _command(kind: str) -> None:
    def run(config: Path | None, resume: bool, as_json: bool, **given: Any) -> None:
        file = known.read(config) if config is not None else _begun(given["output"]) if resume else {}
        _run(settings_of(kind, file, given), resume, as_json)

    run.__doc__ = known.KINDS[kind].about
    run.__signature__ = inspect.Signature(list(_parameters(kind)))  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters(kind)}
    train.command(kind)(reports_errors(run))


def settings_of(kind: str, file: dict[str, Any], flags: dict[str, Any]) -> known.TrainingSettings:
    """Combine the settings of a file with those of the flags, which take precedence."""
    found = dict(file)
    if (other := found.pop("kind", kind)) != kind:
        raise UsageError(f"the settings are for {other}, not for {kind}")
    for name, value in flags.items():
        if value not in (None, []):
            found[name] = pairs(value) if name in ("option", "head") else value
    return known.make(kind, found)


def _begun(output: str | None) -> dict[str, Any]:
    """Read the settings of the run to resume."""
    from outpace.train import log

    if output is None:
        raise UsageError("--resume needs --output, the folder of the run")
    return log.settings(Path(output))


train.command("data")(data)
for _kind in known.KINDS:
    _command(_kind)


def _run(settings: known.TrainingSettings, resume: bool, as_json: bool) -> None:
    from outpace.train.distributed import Distributed
    from outpace.train.run import check, prepare

    check(settings, resume)
    world = Distributed.join(settings.device)
    try:
        model = load_model(
            settings.model, Loading(settings.dtype or None, world.device(settings.device), compile=False)
        )
        loop = prepare(settings, model, world, resume)
        _watch(loop)
        if world.first:
            _conclude(loop, as_json)
    finally:
        world.leave()


def _watch(loop: Loop) -> None:
    """Run to the end with a progress bar; Ctrl-C prints how to continue."""
    with _bar(loop) as show:
        try:
            for point in loop.run():
                show(point)
        except KeyboardInterrupt:
            if loop.world.first and loop.reached.step:
                again = f"outpace train {loop.settings.kind} --output {loop.folder} --resume"
                stderr.print(
                    f"step {loop.reached.step} is saved; to continue: {again}", highlight=False, soft_wrap=True
                )
            raise


@contextmanager
def _bar(loop: Loop) -> Iterator[Any]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=stderr, disable=not loop.world.first) as bar:
        task = bar.add_task(loop.settings.kind, total=loop.settings.steps, completed=loop.reached.step, said="")

        def show(point: LogPoint) -> None:
            bar.update(task, completed=point.step, said=_said(point))
            if point.measured is not None and loop.world.first:
                bar.console.print(_measured(point), highlight=False, soft_wrap=True)

        yield show


def _said(point: LogPoint) -> str:
    overlap = " ".join(f"{value:.2f}" for value in point.acceptance)
    return "" if point.loss is None else f"loss {point.loss:.3f} overlap {overlap}"


def _measured(point: LogPoint) -> str:
    assert point.measured is not None
    depths = " ".join(f"{value:.2f}" for value in point.measured.by_depth)
    figures = f"{point.measured.tokens_per_pass:.2f} tokens per pass, accepted {point.measured.acceptance:.0%}"
    return f"step {point.step}: {figures} (by depth {depths})"


def _conclude(loop: Loop, as_json: bool) -> None:
    """Print how to use the result, and draw the plot."""
    from outpace.errors import OutpaceError
    from outpace.train import plot

    try:
        plotted: Path | None = plot.draw(loop.folder)
    except OutpaceError as error:
        plotted = None
        stderr.print(f"[yellow]no plot:[/] {error}", highlight=False)
    if as_json:
        reached = {"steps": loop.reached.step, "tokens_per_pass": loop.reached.best}
        typer.echo(json.dumps({**reached, "output": str(loop.folder), "plot": plotted and str(plotted)}))
        return
    use = USES.get(loop.settings.kind, "--method {kind} -o head={folder}")
    exit = loop.settings.option.get("exit", 0)
    typer.echo(use.format(kind=loop.settings.kind, folder=loop.folder, exit=exit))
    if plotted is not None:
        Console(stderr=True).print(str(plotted), highlight=False, soft_wrap=True)
