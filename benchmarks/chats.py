"""Training prompts like those of chat users: templates filled with topics and names, often with a second turn.

    python benchmarks/chats.py --texts english.txt --count 14000 --output chats.jsonl
    outpace train data MODEL --prompts chats.jsonl --output answers.jsonl

A small model that writes its own prompts produces few kinds. These cover what users ask for: writing, roles, reasoning,
extraction, code, science and history.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from readings import NAME, PARAGRAPH, paragraphs, write

TOPICS = (
    "climate change", "online learning", "a used bicycle", "remote work", "the solar system", "a family dinner",
    "electric cars", "healthy breakfasts", "the French Revolution", "photosynthesis", "black holes", "inflation",
    "a lost dog", "social media", "space travel", "a haunted house", "gardening", "public transport", "friendship",
    "machine learning", "the stock market", "vaccines", "a rainy day", "ancient Egypt", "chess", "coffee", "jazz",
    "a job interview", "a birthday party", "learning to swim", "plastic waste", "the human heart", "earthquakes",
    "a small town library", "video games", "meditation", "the Roman Empire", "quantum computing", "a train journey",
    "solar panels", "stress at work", "raising children", "the water cycle", "a broken phone", "volcanoes", "tea",
    "saving money", "a school play", "renewable energy", "evolution", "the internet", "sleep", "a mountain hike",
    "local elections", "robots", "a seaside holiday", "bread", "DNA", "the Cold War", "a football team", "bees",
    "time management", "a new restaurant", "poetry", "artificial intelligence", "supply and demand", "gravity",
    "a neighbour's noise", "running a marathon", "the Great Depression", "museums", "antibiotics", "cryptocurrency",
    "a wedding speech", "wolves", "the Industrial Revolution", "cooking rice", "an old photograph", "magnets",
    "democracy", "a software update", "winter", "the immune system", "a lighthouse", "shipping costs", "whales",
    "world trade", "a science fair", "ocean tides", "a detective", "philosophy", "teamwork", "a power cut",
    "the speed of light", "budget travel", "a fitness app", "modern art", "cloud computing", "honesty", "dragons",
)  # fmt: skip
ROLES = (
    "a doctor", "a pirate", "a teacher of small children", "a travel guide", "a lawyer", "a chef", "a time traveller",
    "a detective in London", "a physics professor", "a football coach", "a customer service agent", "a historian",
    "a wise old wizard", "a financial adviser", "a software engineer", "a journalist", "a therapist", "a farmer",
    "a robot that has feelings", "a news presenter", "a poet", "a mathematician", "an astronaut", "a mechanic",
)  # fmt: skip
PIECES = (
    "a short story", "a blog post", "a persuasive email", "a formal letter", "a poem", "a speech", "a product review",
    "an essay", "a dialogue between two friends", "an advertisement", "a social media post", "an opening paragraph",
    "a newspaper article", "a song", "a cover letter", "a script for a short video", "a recipe", "an apology",
    "an invitation", "a summary for a busy manager", "a lesson plan", "a list of ten ideas", "a limerick",
)  # fmt: skip
LIMITS = (
    "", "", "", "", " Please answer in fewer than 200 words.", " Use a friendly tone.", " Keep it to two paragraphs.",
    " Give concrete examples.", " Write in simple language.", " Use bullet points.", " Explain your reasoning.",
)  # fmt: skip
FORMS = (
    "Write {piece} about {topic}.{limit}", "Write {piece} about {topic}.{limit}", "Write {piece} about {name}.{limit}",
    "Compose {piece} in which {topic} and {other} play a part.{limit}", "Explain {topic} to a ten-year-old.{limit}",
    "What are the advantages and disadvantages of {topic}?{limit}", "Compare {topic} and {other}.{limit}",
    "Imagine you are {role}. {asked}", "Pretend to be {role} and answer this question: {asked}",
    "You are {role}. Tell me what you think about {topic}.{limit}", "Give me five tips on {topic}.{limit}",
    "How does {topic} affect {other}?{limit}", "What should everybody know about {topic}?{limit}",
    "Describe {topic} in vivid detail.{limit}", "Describe the life and work of {name}.{limit}",
    "Draft {piece} to my boss about {topic}.{limit}", "What is {topic}?", "Why is {topic} important?{limit}",
    "Provide an outline of a talk about {topic}, with headings.{limit}", "Tell me a joke about {topic}.",
    "I need help with {topic}. Where do I start?", "What happened in {place} in {year}?",
    "How did {name} change the world?{limit}", "Plan a weekend in {place}.{limit}",
    "What are the causes and effects of {topic}?{limit}", "Is it true that {topic} is related to {other}? Why?",
    "Write a function in Python that {job}.", "Write a program in C++ that {job}.", "How do I {chore} in {tool}?",
    "Write an HTML page about {topic}.", "Implement a {structure} and explain how it works.",
    "{who} has {a} apples and buys {b} more. He gives away a third of them. How many are left?",
    "If a train travels {a} kilometres in {b} minutes, how fast is it? Explain step by step.",
    "The sides of a triangle are {a}, {b} and {c}. What is its perimeter?", "Solve for x: {b}x + {a} = {c}.",
    "{who} is taller than {whom}, and {whom} is taller than {third}. Who is the shortest? Explain.",
    "Extract all names and dates from this text, as JSON:\n\n{text}", "List the key facts in this passage:\n\n{text}",
    "Rate this text from 1 to 5, and say why:\n\n{text}", "Edit this paragraph for grammar:\n\n{text}",
    "Which category fits this text best: sports, politics, science or art?\n\n{text}",
    "What is the origin of {name}?", "Which books about {topic} do you recommend, and why?{limit}",
    "What is the relation between {topic} and {other}? {limit}", "Debate with me: {topic} does more harm than good.",
    "Design an experiment to find out more about {topic}.{limit}", "Who was {name}?", "Tell me about {place}.",
    "What are the most important events in the history of {place}?", "Summarize what is known about {topic}.{limit}",
)  # fmt: skip
SECOND = (
    "Rewrite your previous response in a more formal style.", "Now make it half as long.", "Give me an example.",
    "Take your previous answer and turn it into a poem.", "What could go wrong?", "Explain the second point further.",
    "Start every sentence with the letter {letter}.", "Do the same for {other}.", "How would {role} put this?",
    "Translate the first sentence into French.", "What are common arguments against this?", "Why?",
    "Summarize that in three bullet points.", "Add a metaphor to each sentence.", "Are you sure? Check your answer.",
    "Now imagine the opposite. What changes?", "Rewrite it for children.", "Which of these matters most?",
    "Put the main points into a table.", "What if the number were twice as large?", "Can it be done faster?",
    "Evaluate your answer critically.", "Give your answer as a list.", "What happened next?",
    "Mention a famous work of literature in each paragraph.", "Modify it so that it takes {b} arguments.",
)  # fmt: skip
CHOICES: dict[str, tuple[str, ...]] = {
    "topic": TOPICS, "other": TOPICS, "role": ROLES, "piece": PIECES, "limit": LIMITS,
    "who": ("Tom", "Ali", "Maria", "Jen"), "whom": ("Sam", "Lucy", "Omar"), "third": ("Anna", "Ben", "Kim"),
    "letter": ("A", "B", "S", "T"), "tool": ("Linux", "Excel", "git", "SQL", "Python", "JavaScript"),
    "chore": ("sort a list", "rename a file", "undo a mistake", "count words", "merge two tables", "find an error"),
    "structure": ("queue", "linked list", "binary search tree", "hash map", "stack", "priority queue"),
    "job": (
        "reverses a string", "finds the largest number in a list", "checks whether a word is a palindrome",
        "counts how often each word occurs in a file", "computes the nth Fibonacci number", "merges two sorted lists",
        "finds the longest common prefix", "validates an email address", "prints a calendar month", "sorts by two keys",
        "converts temperatures", "removes duplicates", "draws a pattern of stars", "finds all primes below a limit",
    ),
    "asked": (
        "What do you do on a normal day?", "How would you explain your work to a child?", "What worries you most?",
        "A stranger asks you for advice about money. What do you say?", "Tell a story from your youth.",
        "Describe the most difficult case you have ever had.", "What is the secret of a good life?",
    ),
}  # fmt: skip


def fill(form: str, names: list[str], texts: list[str], draw: random.Random) -> str:
    """Fill each placeholder of the template with random words."""
    numbers = {name: str(draw.randint(2, 90)) for name in "abc"}
    drawn: dict[str, str] = {name: draw.choice(words) for name, words in CHOICES.items()}
    text = draw.choice(texts)[: draw.randint(PARAGRAPH, 1200)]
    others = {"name": draw.choice(names), "place": draw.choice(names), "year": str(draw.randint(1800, 2020))}
    return form.format(**drawn, **numbers, **others, text=text).strip()


def main(
    output: Annotated[Path, typer.Option(help="File to write.")],
    texts: Annotated[
        list[Path], typer.Option(exists=True, help="Plain texts to quote and take names from, one paragraph per line.")
    ],
    count: Annotated[int, typer.Option(help="Number of prompts.")] = 1500,
    two_turns: Annotated[float, typer.Option(help="Share of prompts with a second turn.")] = 0.4,
    seed: int = 0,
) -> None:
    quoted = [text for file in texts for text in paragraphs(file, PARAGRAPH)]
    names = sorted({name for text in quoted for name in NAME.findall(text)})
    draw = random.Random(seed)
    filled: Callable[[str], str] = lambda form: fill(form, names, quoted, draw)  # noqa: E731

    def talk() -> list[str]:
        first = filled(draw.choice(FORMS))
        return [first, filled(draw.choice(SECOND))] if draw.random() < two_turns else [first]

    write(output, (talk() for _ in range(count)))


if __name__ == "__main__":
    typer.run(main)
