"""Training prompts like those of chat users: about texts of up to a page, short questions, and translations.

    python benchmarks/readings.py articles --output articles.jsonl
    outpace train data MODEL --prompts articles.jsonl --temperature 0.8 --output own.jsonl
    python benchmarks/readings.py readings MODEL own.jsonl --texts english.txt --foreign german.txt --output asked.jsonl
    outpace train data MODEL --prompts asked.jsonl --longest-prompt 1300 --output answers.jsonl

The prompts that a small model writes are a sentence or two. A head that is trained only on those drafts badly where
answers quote a long text or one in another language. The texts are any plain-text files, and optionally what the model
has written itself.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from transformers import AutoTokenizer

from outpace.api import demo_weights
from outpace.train.data.records import TextRecord, read

app = typer.Typer(help=__doc__, add_completion=False, rich_markup_mode=None)
SHORTEST = 60  # least tokens of an answer to quote
LONGEST = 4500  # most characters that a prompt quotes
PARAGRAPH = 200  # least characters of a paragraph to quote

KINDS = ("a news article", "a newspaper report", "an encyclopedia article")
EVENTS = (
    "a court case", "a football match", "an election", "a film and its actors", "a band and its albums", "a storm",
    "a crime", "a television series", "a royal family", "a new phone", "a car accident", "a war",
    "a scientific discovery", "a company", "a school", "a celebrity", "a tennis tournament", "a river",
    "a politician", "a protest", "a disease", "a football club", "a trade agreement", "a railway", "an animal",
    "a novel and its author", "a hospital", "a museum", "a battle", "a song",
)  # fmt: skip
PLACES = (
    "the United States", "England", "Scotland", "Germany", "France", "Spain", "Italy", "Russia", "China", "Japan",
    "India", "Australia", "Brazil", "Mexico", "Canada", "South Africa", "Egypt", "Turkey", "Ireland", "New York",
    "London", "Chicago", "California", "Texas", "Pakistan", "Nigeria", "Greece", "Poland", "Sweden", "Korea",
)  # fmt: skip
REWORKED = (
    "Rewrite your previous answer in a simpler way.", "Explain that again in more detail.", "Give an example.",
    "Rewrite it as a poem.", "Summarize your previous response in one sentence.", "Are you sure?",
    "Make it shorter.", "What are the disadvantages?", "Write the same as a letter to a friend.",
    "Put that into a list of five points.",
)  # fmt: skip
READ = (
    "Summarize: {text}", "Summarize: {text}", "Summarize the following text in a few sentences.\n\n{text}",
    "{text}\n\nWhat are the main points of this text?",
    "{text}\n\nWrite a headline for this article, and one sentence.", "Who is mentioned in this text?\n\n{text}",
    "Correct the spelling of this text:\n\n{text}",
)  # fmt: skip
TRANSLATED = (
    "Translate German to English: {text}", "Translate German to English: {text}", "Translate into English: {text}",
    "What does this mean in English? {text}",
)  # fmt: skip
QUESTIONS = (
    "Who played {a} in {b}?", "When did {a} come out?", "Where is {a} located?", "What is the meaning of {a}?",
    "Who won {a} in {year}?", "How many seasons of {a} are there?", "Who wrote the book {a}?", "When was {a} born?",
    "What is the population of {a}?", "Who sings the song {a}?", "Where was {a} filmed?",
    "Who is the owner of {a}?", "What is {a} known for?", "When did {a} die?", "How old is {a}?",
    "What is the difference between {a} and {b}?", "Who founded {a}?", "Why did {a} leave {b}?",
    "What language is spoken in {a}?", "When was the last time {a} won {b}?", "What county is {a} in?",
    "How far is {a} from {b}?", "Who was the president of {a} in {year}?", "What is the name of the {b} in {a}?",
    "Where does the last name {a} come from?", "Who discovered {a}?",
)  # fmt: skip
NAME = re.compile(r"\b[A-Z][a-z]+(?: (?:of |the )*[A-Z][a-z]+)+")


@dataclass(frozen=True)
class Sources:
    """The material for the prompts."""

    pairs: list[tuple[str, str]]  # a question and its answer
    texts: list[str]  # passages
    foreign: list[str]
    names: list[str]


def read_text(sources: Sources, draw: random.Random) -> list[str]:
    return [draw.choice(READ).format(text=" ".join(_some(sources.texts, draw, 4)))]


def answered(sources: Sources, draw: random.Random) -> list[str]:
    """Passages followed by a question: one that a passage answers, or one about a name in them."""
    if sources.pairs and draw.random() < 0.3:
        chosen = draw.sample(sources.pairs, draw.randint(2, 4))
        return ["\n".join(answer for _, answer in chosen)[:LONGEST] + f"\n{draw.choice(chosen)[0]}"]
    passages = _some(sources.texts, draw, 4)
    names = NAME.findall(" ".join(passages)) or sources.names
    return ["\n".join(passages) + "\n" + _question(names, draw)]


def translated(sources: Sources, draw: random.Random) -> list[str]:
    return [draw.choice(TRANSLATED).format(text=draw.choice(sources.foreign))]


def questioned(sources: Sources, draw: random.Random) -> list[str]:
    question = _question(sources.names, draw)
    return [question if draw.random() < 0.5 else question[0] + question[1:].lower()]


def reworked(sources: Sources, draw: random.Random) -> list[str]:
    return [draw.choice(sources.pairs)[0], draw.choice(REWORKED)]


ASKED: dict[Callable[[Sources, random.Random], list[str]], int] = {
    read_text: 5, answered: 5, translated: 4, questioned: 3, reworked: 2,
}  # fmt: skip


def _question(names: list[str], draw: random.Random) -> str:
    return draw.choice(QUESTIONS).format(a=draw.choice(names), b=draw.choice(names), year=draw.randint(1950, 2022))


def _some(texts: list[str], draw: random.Random, most: int) -> list[str]:
    """Choose consecutive passages, as in an article, up to a page."""
    start, chosen = draw.randrange(len(texts)), list[str]()
    for text in texts[start : start + draw.randint(1, most)]:
        if sum(map(len, chosen)) + len(text) <= LONGEST or not chosen:
            chosen.append(text[:LONGEST])
    return chosen


def paragraphs(file: Path, shortest: int) -> list[str]:
    """Read the paragraphs of a plain text, without WikiText's markup."""
    lines = re.sub(r" @(.)@ ", r"\1", file.read_text(encoding="utf-8")).replace(" <unk>", "").splitlines()
    lines = [re.sub(r" ([.,;:)'])", r"\1", line).replace("( ", "(").strip() for line in lines]
    return [line for line in lines if len(line) >= shortest and not line.startswith("=")]


def write(output: Path, prompts: Iterable[list[str]]) -> None:
    lines = [json.dumps({"turns": turns}) + "\n" for turns in prompts]
    output.write_text("".join(lines), encoding="utf-8")
    typer.echo(f"{len(lines)} prompts in {output}")


@app.command()
def articles(output: Annotated[Path, typer.Option(help="File to write.")]) -> None:
    """Write prompts that ask for texts, to be quoted later."""
    asked = "Write {kind} about {event} in {place}. Name people and places, and quote what they said."
    every = itertools.product(KINDS, EVENTS, PLACES)
    write(output, ([asked.format(kind=kind, event=event, place=place)] for kind, event, place in every))


@app.command()
def readings(
    model: Annotated[str, typer.Argument(help="Demo model or folder: the tokenizer of the data.")],
    output: Annotated[Path, typer.Option(help="File to write.")],
    texts: Annotated[list[Path], typer.Option(help="Plain text to quote, one paragraph per line; repeatable.")],
    foreign: Annotated[Path, typer.Option(help="Plain text in another language, a few sentences per line.")],
    data: Annotated[list[Path] | None, typer.Argument(help="Files of `outpace train data`.")] = None,
    count: Annotated[int, typer.Option(help="Number of prompts.")] = 1500,
    seed: int = 0,
) -> None:
    """Write prompts that quote texts, and some that do not."""
    tokenizer = AutoTokenizer.from_pretrained(
        demo_weights.folder(model) if model in demo_weights.DEMO_MODELS else model
    )

    def said(record: TextRecord) -> tuple[str, str]:
        prompt = tokenizer.decode(record.tokens[: record.prompt])
        question = prompt.rsplit("user\n", 1)[-1].split("<|im_end|>")[0]
        return question.strip(), tokenizer.decode(record.answer, skip_special_tokens=True).strip()

    pairs = [said(record) for record in (read(data) if data else []) if len(record.tokens) - record.prompt >= SHORTEST]
    passages = [text for file in texts for text in paragraphs(file, PARAGRAPH)] + [answer for _, answer in pairs]
    names = sorted({name for text in passages for name in NAME.findall(text)})
    sources, draw = Sources(pairs, passages, paragraphs(foreign, 20), names), random.Random(seed)
    asked = {kind: often for kind, often in ASKED.items() if pairs or kind is not reworked}
    kinds = draw.choices(list(asked), weights=list(asked.values()), k=count)
    write(output, (kind(sources, draw) for kind in kinds))


if __name__ == "__main__":
    app()
