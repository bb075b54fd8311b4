"""Prompts that quote longer texts, made of what a model has written itself: to summarise, to answer from, to rework.

    outpace train data MODEL --self-written 2000 --output own.jsonl
    python benchmarks/readings.py MODEL own.jsonl --count 1500 --output readings.jsonl
    outpace train data MODEL --prompts readings.jsonl --output answers.jsonl

People ask about texts as long as a page; prompts that a small model thinks of are a sentence or two. A head that has
only seen short texts guesses badly behind long ones.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from transformers import AutoTokenizer

from outpace import shelf
from outpace.train.records import Record, read

SHORTEST = 60  # tokens of an answer that is worth quoting
REWORKED = ("Rewrite your previous answer in a simpler way.", "Explain that again in more detail.", "Give an example.")
TASKS = (
    "Summarize: {text}",
    "Summarize the following text in a few sentences.\n\n{text}",
    "{text}\n\nWhat are the main points of this text?",
    "Translate English to German: {sentence}",
)


def quoted(texts: list[str], draw: random.Random) -> list[str]:
    """One to four texts, one after the other."""
    body = "\n".join(draw.sample(texts, draw.randint(1, 4)))
    sentence = max(body.split(". ")[:3], key=len)
    return [draw.choice(TASKS).format(text=body, sentence=sentence)]


def asked(pairs: list[tuple[str, str]], draw: random.Random) -> list[str]:
    """A question behind passages, one of which answers it."""
    chosen = draw.sample(pairs, draw.randint(2, 5))
    question = draw.choice(chosen)[0]
    return ["\n".join(answer for _, answer in chosen) + f"\n{question}"]


def reworked(questions: list[str], draw: random.Random) -> list[str]:
    return [draw.choice(questions), draw.choice(REWORKED)]


def main(
    model: Annotated[str, typer.Argument(help="Shelf name or folder: whose tokenizer wrote the data.")],
    data: Annotated[list[Path], typer.Argument(help="Files of `outpace train data`.")],
    output: Annotated[Path, typer.Option(help="The file to write.")],
    count: Annotated[int, typer.Option(help="Prompts.")] = 1500,
    seed: int = 0,
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shelf.folder(model) if model in shelf.SHELF else model)

    def said(record: Record) -> tuple[str, str]:
        prompt = tokenizer.decode(record.tokens[: record.prompt])
        question = prompt.rsplit("user\n", 1)[-1].split("<|im_end|>")[0]
        return question.strip(), tokenizer.decode(record.answer, skip_special_tokens=True).strip()

    pairs = [said(record) for record in read(data) if len(record.tokens) - record.prompt >= SHORTEST]
    draw, texts, questions = random.Random(seed), [answer for _, answer in pairs], [question for question, _ in pairs]
    kinds: list[Callable[[], list[str]]] = [
        lambda: quoted(texts, draw), lambda: asked(pairs, draw), lambda: reworked(questions, draw)
    ]  # fmt: skip
    with output.open("w", encoding="utf-8") as file:
        for _ in range(count):
            turns = draw.choices(kinds, weights=(4, 4, 2))[0]()
            file.write(json.dumps({"turns": turns}) + "\n")
    typer.echo(f"{count} prompts in {output}")


if __name__ == "__main__":
    typer.run(main)
