"""Flags that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelName = Annotated[str, typer.Option("--model", "-m", help="Shelf name, folder, hub id or GGUF file.")]
Method = Annotated[str, typer.Option(help="A method of `outpace methods`.")]
Draft = Annotated[str | None, typer.Option(help="Draft model: shelf name, folder or hub id.")]
Options = Annotated[list[str], typer.Option("--option", "-o", help="An option of the method, as name=value.")]
PolicyName = Annotated[
    str | None, typer.Option("--policy", help="How much to draft: auto, fixed, ...; default: what the method asks for.")
]
VerifierName = Annotated[
    str | None,
    typer.Option("--verifier", help="match, residual, typical, contrastive; default: what the method asks for."),
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens that hold this much probability.")]
TopK = Annotated[int, typer.Option(help="Keep this many likeliest tokens; 0 keeps all.")]
Seed = Annotated[int, typer.Option(help="Same seed, same text, with or without speculation.")]
Settings = Annotated[
    list[str], typer.Option("--set", "-s", help="Any other setting, as name=value (see docs/guide/python-api.md).")
]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, ...; default: float32 on a CPU.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
Compile = Annotated[
    bool | None,
    typer.Option("--compile/--no-compile", help="Compile the layers, or run them as they are; default: large models."),
]
Quantize = Annotated[str | None, typer.Option(help="int8: keep the weights of linear layers as int8.")]
QuantizeDraft = Annotated[
    str | None, typer.Option(help="int8: the same for the draft alone; the answer stays the target's.")
]
Bitwise = Annotated[
    bool | None,
    typer.Option("--bitwise/--no-bitwise", help="Bit-identical passes: slower, and the default of GGUF files alone."),
]
TracePath = Annotated[Path | None, typer.Option("--trace", help="Write what every pass did to this file (JSONL).")]
TraceProbs = Annotated[bool, typer.Option("--trace-probs", help="Put the target's probabilities into the trace.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
