"""Start-up time: how long commands take in a cold process, with the caches on disk that the first run leaves.

    python benchmarks/first_minute.py
    python benchmarks/first_minute.py --other FOLDER    # compare with another checkout, in turn

Every command runs once in each checkout before it is measured; the table has the medians of the later rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import typer

QUESTION = "Why is the sky blue?"
COMMANDS: dict[str, list[str]] = {
    "`python -c 'import torch'`": ["-c", "import torch"],
    "`outpace --help`": ["-m", "outpace", "--help"],
    "`outpace methods`": ["-m", "outpace", "methods"],
    "a wrong option": ["-m", "outpace", "generate", "hi", "--method", "ngram", "-o", "maxn=3"],
    "a wrong model": ["-m", "outpace", "generate", "hi", "--model", "no/such/folder"],
    "20 tokens, GGUF": [
        "-m", "outpace", "generate", QUESTION, "--max-tokens", "20", "--model", "smollm2-135m-instruct.gguf",
    ],
    "20 tokens, torch": ["-m", "outpace", "generate", QUESTION, "--max-tokens", "20"],
    "20 tokens, torch, `--no-compile`": ["-m", "outpace", "generate", QUESTION, "--max-tokens", "20", "--no-compile"],
}  # fmt: skip


def seconds(folder: Path, arguments: list[str]) -> float:
    """Time a command from start to exit."""
    start = time.perf_counter()
    given = os.environ | {"PYTHONPATH": str(folder)}
    subprocess.run([sys.executable, *arguments], cwd=folder, env=given, capture_output=True, check=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="another checkout, to measure in turn with this one")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    folders = [*([given.other.resolve()] if given.other else []), Path(__file__).resolve().parent.parent]
    typer.echo(
        "| command | " + " | ".join("seconds, " + ("here" if f is folders[-1] else "there") for f in folders) + " |"
    )
    typer.echo("|---|" + "---|" * len(folders))
    for name, arguments in COMMANDS.items():
        spent: dict[Path, list[float]] = {folder: [] for folder in folders}
        for turn in range(given.rounds + 1):
            for folder in folders:
                took = seconds(folder, arguments)
                spent[folder] += [took] if turn else []
        typer.echo(f"| {name} | " + " | ".join(f"{statistics.median(spent[f]):.2f}" for f in folders) + " |")


if __name__ == "__main__":
    main()
