"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outpace.registry import names

ModelName = Annotated[str, typer.Option("--model", "-m", help="Demo model, folder, Hugging Face id or GGUF file.")]
Method = Annotated[str, typer.Option(help="Decoding method (see `outpace methods`).")]
Draft = Annotated[str | None, typer.Option(help="Draft model: demo model, folder or Hugging Face id.")]
Options = Annotated[list[str], typer.Option("--option", "-o", help="Option of the method, as name=value; repeatable.")]
PolicyName = Annotated[
    str | None, typer.Option("--policy", help="How much to draft: auto, fixed, ...; default: the method's own.")
]
*_verifiers, _last = names("verifier")
VerifierName = Annotated[
    str | None,
    typer.Option("--verifier", help=f"Accept by {', '.join(_verifiers)} or {_last}; default: the method's own."),
]
MaxTokens = Annotated[int, typer.Option(help="Maximum number of tokens to generate.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total probability.")]
TopK = Annotated[int, typer.Option(help="Sample from this many likeliest tokens; 0 means all.")]
Seed = Annotated[int, typer.Option(help="Random seed: the same seed gives the same text, with or without speculation.")]
Settings = Annotated[
    list[str], typer.Option("--set", "-s", help="Any other setting, as name=value (see docs/guide/python-api.md).")
]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, ...; default: float32 on a CPU.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
Compile = Annotated[
    bool | None,
    typer.Option("--compile/--no-compile", help="Compile the layers; default: only for large models."),
]
Quantize = Annotated[str | None, typer.Option(help="int8: store the weights of linear layers in 8 bits.")]
Adapter = Annotated[str | None, typer.Option(help="LoRA adapter of the model: a folder or Hugging Face id.")]
QuantizeDraft = Annotated[
    str | None, typer.Option(help="int8: quantize only the draft model, which does not change the answers.")
]
Bitwise = Annotated[
    bool | None,
    typer.Option(
        "--bitwise/--no-bitwise", help="Results bit-identical to plain decoding; slower. Default: only GGUF files."
    ),
]
TensorParallel = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel", min=1, help="Processes that share the model; default: as many as torchrun has started."
    ),
]
TracePath = Annotated[Path | None, typer.Option("--trace", help="Record every pass in this JSONL file.")]
TraceProbs = Annotated[bool, typer.Option("--trace-probs", help="Include the target's probabilities in the trace.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
