"""outpace prune: find the layers that a model needs least, and write a checkpoint without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outpace.cli import checks
from outpace.cli.common import Loading, app, load_model, reports_errors, stderr
from outpace.cli.flags import AsJson, Device, Dtype
from outpace.errors import UnsupportedModel, UsageError, unknown
from outpace.version import __version__

if TYPE_CHECKING:
    from outpace.api.model import Model
    from outpace.drafting.layer_search import LayerProbe

RULES = ("angle", "search")
DEPTH = 4  # draft length for the tokens per pass
LONGEST = 512  # tokens of a prompt: longer ones lose their beginning

Remove = Annotated[int, typer.Option(help="Number of layers to remove.")]
Layers = Annotated[str | None, typer.Option(help="Layers to keep, as 0-8+15-29, instead of --remove.")]
Output = Annotated[Path | None, typer.Option(help="New folder for the checkpoint; it must not exist yet.")]
By = Annotated[str, typer.Option(help="angle: the block that rotates its input least; search: any layers, by trial.")]
Tries = Annotated[int, typer.Option(min=0, help="Number of layer sets that the search tries.")]
Prompts = Annotated[Path | None, typer.Option(help="JSONL with prompt, turns or messages; default: built-in prompts.")]


@app.command()
@reports_errors
def prune(
    model: Annotated[str, typer.Argument(help="Demo model, folder or Hugging Face id.")],
    remove: Remove = 0,
    layers: Layers = None,
    output: Output = None,
    by: By = RULES[0],
    tries: Tries = 24,
    prompts: Prompts = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of prompts per task.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer to evaluate on.")] = 32,
    as_json: AsJson = False,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Find the layers that a model needs least, on its own answers; with --output, write a checkpoint without them.

    The checkpoint is a draft model for the same model, or for a larger one with the same vocabulary: --draft FOLDER.
    """
    loading = Loading(dtype, device, compile=False)
    loading.check(model)
    if by not in RULES:
        raise unknown("rule to prune by", by, RULES)
    if (remove > 0) == (layers is not None):
        raise UsageError("give either --remove, the number of layers to remove, or --layers, those to keep")
    checks.readable(prompts)
    from outpace.core.lm import layers_of
    from outpace.drafting.layer_search import parse, spell, without
    from outpace.models.hf import checkpoint as checkpoints

    if output is not None:
        checkpoints.check_output(output)
    lm = load_model(model, loading)
    stack = layers_of(lm.lm).count
    if stack < 2:
        raise UnsupportedModel(f"{model} cannot be pruned: it has no stack of layers")
    if remove >= stack:
        raise UsageError(f"--remove {remove} leaves no layer: {model} has {stack}")
    with stderr.status("evaluating layers on the model's answers"):
        probe = _probe(lm, prompts, limit, max_tokens)
        gone = probe.search(remove, tries) if by == "search" else probe.block(remove) if remove else []
        kept = without(stack, gone) if layers is None else sorted(set(parse(layers)))
        found = _figures(probe, kept)
    if output is not None:
        with stderr.status(f"writing {output}"):
            rule = "as given" if layers is not None else f"chosen by {by}"
            note = _note(model, spell(kept), stack, rule, found)
            checkpoints.save(lm.lm.model, kept, lm.tokenizer, output, note)  # type: ignore[attr-defined]
    left = [layer for layer in range(stack) if layer not in kept]
    if as_json:
        answer = {"model": model, "kept": kept, "removed": left, **found, "output": output and str(output)}
        typer.echo(json.dumps(answer))
    else:
        _show(kept, left, found, output)


def _probe(lm: Model, prompts: Path | None, limit: int | None, max_tokens: int) -> LayerProbe:
    """Generate the model's own answers, whose tokens a draft would have to match."""
    from outpace.drafting.layer_search import LayerProbe, ProbeText
    from outpace.prompts import tasks

    asked = [tasks.encode(prompt, lm)[-LONGEST:] for prompt in tasks.load(prompts, limit=limit)]
    answers = lm.generate(asked, method="plain", max_tokens=max_tokens)
    return LayerProbe(lm.lm, [ProbeText(p + a.tokens, len(p) - 1) for p, a in zip(asked, answers, strict=True)])


def _figures(probe: LayerProbe, kept: list[int]) -> dict[str, Any]:
    from outpace.core.lm import layers_of
    from outpace.drafting.layer_search import agreement, tokens_per_pass

    matches = probe.kept(kept)
    return {
        "agreement": agreement(matches),
        "tokens_per_pass": tokens_per_pass(matches, DEPTH),
        "share": layers_of(probe.target).cost_share(len(kept)),
        "places": sum(map(len, matches)),
    }


def _note(model: str, kept: str, stack: int, rule: str, found: dict[str, Any]) -> str:
    return (
        f"# {Path(model).name} without some of its layers\n\n"
        f"Layers {kept} of {stack} of `{model}`, {rule}; all other weights are unchanged, without further training. "
        f"On {found['places']} tokens of the whole model's own answers, which were also used for the choice, it "
        f"predicts the same token for {found['agreement']:.0%}. Made as a draft for speculative decoding by "
        f"`outpace prune` (outpace {__version__}); its licence is that of the original.\n"
    )


def _show(kept: list[int], left: list[int], found: dict[str, Any], output: Path | None) -> None:
    from outpace.drafting.layer_search import spell

    table = Table("layers kept", "removed", "same token", f"tokens per pass, depth {DEPTH}", "draft token cost")
    figures = f"{found['agreement']:.0%}", f"{found['tokens_per_pass']:.2f}", f"{found['share']:.2f} passes"
    table.add_row(spell(kept), spell(left), *figures)
    Console().print(table)
    typer.echo(f"--method pruned -o layers={spell(kept)}" + (f", or --draft {output}" if output is not None else ""))
