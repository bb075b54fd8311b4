"""The contestants of gguf_models.py: llama.cpp as a library, its server in a separate process, and Outpace."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Generator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
import typer

from outpace.api.model import Model

DRAFT = "draft-simple"  # the server mode that needs a draft model


@dataclass(frozen=True)
class Answer:
    """The answer of a contestant, and its speed."""

    seconds: float  # per token after the first pass
    text: Any  # tokens or text, comparable within one kind of contestant


Passes: TypeAlias = Generator[int, None, list[int]]  # yields the number of tokens after each pass, returns the tokens


class Library:
    """llama.cpp as a library, without a server."""

    def __init__(self, path: Path):
        from cyllama.llama import llama_cpp as library

        given = library.LlamaModelParams()
        given.n_gpu_layers = 0
        self.model = library.LlamaModel(str(path), given)
        self.greedy, self.batch = library.LlamaSampler(), library.LlamaBatch(n_tokens=2048, embd=0, n_seq_max=1)
        self.greedy.add_greedy()

    def ask(self, prompt: list[int], count: int) -> Passes:
        context, said = usual(self.model), list[int]()
        self._decode(context, prompt, 0)
        said.append(self.greedy.sample(context, len(prompt) - 1))
        yield 1
        while len(said) < count and not self.model.get_vocab().is_eog(said[-1]):
            self._decode(context, said[-1:], len(prompt) + len(said) - 1)
            said.append(self.greedy.sample(context, 0))
            yield len(said)
        return said

    def _decode(self, context: Any, tokens: list[int], first: int) -> None:
        self.batch.clear()
        for i, token in enumerate(tokens):
            self.batch.add(token, first + i, [0], i == len(tokens) - 1)
        context.decode(self.batch)


def usual(model: Any) -> Any:
    """Create a context with llama.cpp's own settings."""
    from cyllama.llama import llama_cpp as library

    given = library.LlamaContextParams()
    given.n_ctx, given.n_batch, given.no_perf = 4096, 2048, True
    given.n_threads = given.n_threads_batch = torch.get_num_threads()
    return library.LlamaContext(model, given)


class Served:
    """llama.cpp's server in a separate process, with one kind of speculation or none."""

    def __init__(self, path: Path, mode: str | None = None, draft: Path | None = None):
        here = multiprocessing.get_context("spawn")
        self.line, theirs = here.Pipe()
        self.process = here.Process(target=_serve, args=(theirs, path, mode, draft), daemon=True)
        self.process.start()
        theirs.close()
        self.line.recv()  # wait until it is ready

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()

    def ask(self, prompt: list[int], count: int) -> Answer:
        self.line.send({"prompt": prompt, "n_predict": count, "temperature": 0, "cache_prompt": False})
        done = self.line.recv()
        took = done["timings"]
        return Answer(took["predicted_ms"] / 1e3 / max(took["predicted_n"] - 1, 1), done["choices"][0]["text"])


def _serve(line: Connection, path: Path, mode: str | None, draft: Path | None) -> None:
    library, threads = server_library(), torch.get_num_threads()
    given = library.CommonParams()
    given.model.path, given.n_ctx, given.n_parallel, given.n_gpu_layers = str(path), 4096, 1, 0
    given.cache_ram_mib, given.verbosity = 0, -1
    own = given.speculative.draft
    for params in (given.cpuparams, given.cpuparams_batch, own.cpuparams, own.cpuparams_batch):
        params.n_threads = threads
    if mode is not None:
        name = f"COMMON_SPECULATIVE_TYPE_{mode.upper().replace('-', '_')}"
        given.speculative.types = [getattr(library.common_speculative_type, name)]
    if mode == DRAFT:
        own.mparams.path, own.n_gpu_layers = str(draft), 0
    server = library.Server(given)
    line.send("ready")
    while True:
        line.send(server.handle_completions(line.recv()))


def server_library() -> Any:
    try:
        import xllamacpp
    except ImportError as error:
        raise typer.BadParameter("no llama.cpp server: pip install xllamacpp, or use --no-server") from error
    return xllamacpp


def ours(model: Model, prompt: list[int], count: int, **given: Any) -> Passes:
    model.clear_cache()
    stream, said = model.stream(prompt, max_tokens=count, **given), 0
    for piece in stream:
        said += len(piece.tokens)
        yield said
    return stream.completions[0].tokens


def race(lanes: dict[str, Passes]) -> dict[str, Answer]:
    """Run one pass of each contestant in turn, until all answers are complete."""
    seconds, after, firsts = dict.fromkeys(lanes, 0.0), dict.fromkeys(lanes, 0), dict[str, int]()
    answers = dict[str, Answer]()
    while len(answers) < len(lanes):
        for name in [name for name in lanes if name not in answers]:
            start = time.perf_counter()
            try:
                said = next(lanes[name])
            except StopIteration as end:
                answers[name] = Answer(seconds[name] / max(after[name], 1), end.value)
                continue
            if name in firsts:  # the first pass is the prefill
                seconds[name] += time.perf_counter() - start
                after[name] = said - firsts[name]
            else:
                firsts[name] = said
    return answers
