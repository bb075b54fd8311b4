"""What serving costs, and how it compares.

    python benchmarks/serving.py overhead                                  # the demo model, 8 clients
    python benchmarks/serving.py overhead --model my-model --clients 64 --tokens 256
    python benchmarks/serving.py overhead --random 8b --clients 64         # a random Llama, made on the spot
    python benchmarks/serving.py llama --server llama.cpp/build/bin/llama-server --clients 1,4,8

`overhead` sends the same requests to the engine alone and over HTTP, in turns, on one model. A round is one call of
`generate` with all prompts, then the same prompts over HTTP; the ratio of its tokens per second is what counts, because
both sides of a round see the same machine. Where others use the machine too, the ratio of processor time tells more:
with OMP_NUM_THREADS=1, waiting costs none. Texts must be equal. It needs `pip install 'outpace[serve]'`, or a folder
with fastapi, uvicorn and prometheus_client on PYTHONPATH.

`llama` sends the same prompts to llama.cpp's server and to ours, in turns, with the same GGUF file (llama_server.py).
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import llama_server
from serving_parts import Clients, free_port, say, table
from versions import SHAPES, VOCAB, random_model

import outpace
from outpace.api.model import Model
from outpace.serve.launch import server_of
from outpace.serve.settings import ServeSettings

WAYS = ("whole", "streamed")


class Ratio(NamedTuple):
    """Time of the engine alone as a share of its time in a server."""

    tokens_per_second: float
    processor_time: float


class Served:
    """A server in a thread, and its clients in a process."""

    def __init__(self, model: Model, method: str):
        self.port = free_port()
        self.server = server_of(model, ServeSettings(("model",), "model", port=self.port, method=method))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        self.clients = Clients()
        while self.server.service.state == "starting":
            time.sleep(0.01)

    def close(self) -> None:
        self.clients.close()
        self.server.should_exit = True
        self.thread.join()


def made_up(shape: str) -> Model:
    """A random Llama of a shape, whose tokens are numbers."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0")
    return outpace.wrap(random_model(shape, "cuda" if torch.cuda.is_available() else "cpu"), tokenizer, name=shape)


def measure(model: Model, given: argparse.Namespace) -> tuple[list[float], dict[str, list[Ratio]]]:
    """Return the tokens per second of the engine alone, and the ratios, of each round."""
    prompts = [f"{i}. Tell a story about the number {i}:" for i in range(given.clients)]
    settings: dict[str, Any] = {"max_tokens": given.tokens, "temperature": 0.0, "ignore_eos": True}
    served, speeds, ratios = Served(model, given.method), list[float](), {way: list[Ratio]() for way in WAYS}
    try:
        for round in range(given.rounds + 1):  # the first one warms up
            start, used = time.perf_counter(), time.process_time()
            done = model.generate(prompts, method=given.method, **settings)
            alone, used_alone = time.perf_counter() - start, time.process_time() - used
            speed = given.clients * given.tokens / alone
            speeds += [speed] if round else []
            for way in WAYS:
                bodies = [{**settings, "prompt": prompt, "stream": way == "streamed"} for prompt in prompts]
                used = time.process_time()
                answered = served.clients.ask(served.port, bodies)
                used = time.process_time() - used
                assert answered.texts == [each.text for each in done], "the texts differ"
                if round:
                    ratios[way].append(Ratio(alone / answered.seconds, used_alone / used))
                    say(f"round {round}, {way}: {ratios[way][-1].tokens_per_second:.3f} of {speed:.1f}/s")
    finally:
        served.close()
    return speeds, ratios


def overhead(given: argparse.Namespace) -> None:
    """Measure, and print a table."""
    model = made_up(given.random) if given.random else outpace.load(given.model)
    model.max_batch = max(model.max_batch, given.clients)
    speeds, ratios = measure(model, given)
    rows = []
    for way in WAYS:
        middle = Ratio(*(statistics.median(values) for values in zip(*ratios[way], strict=True)))
        costs = [f"{100 * (1 - share):.1f} %" for share in middle]
        rows.append([way, f"{statistics.median(speeds):.1f}", *costs])
    say(f"{given.clients} clients, {given.tokens} tokens each, method {given.method}, medians of {given.rounds} rounds")
    say(table(["replies", "engine alone, tokens/s", "overhead", "overhead by processor time"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    cost = commands.add_parser("overhead", help="against the engine alone")
    cost.set_defaults(run=overhead)
    cost.add_argument("--model", default="smollm2-135m-instruct")
    cost.add_argument("--random", choices=list(SHAPES), help="a random Llama of this shape instead")
    cost.add_argument("--method", default="plain")
    cost.add_argument("--clients", type=int, default=8)
    cost.add_argument("--tokens", type=int, default=64)
    cost.add_argument("--rounds", type=int, default=5)
    beside = commands.add_parser("llama", help="against llama.cpp's server")
    beside.set_defaults(run=llama_server.side_by_side)
    beside.add_argument("--server", type=Path, required=True, help="llama.cpp's server, as it was built")
    beside.add_argument("--model", help="GGUF file; default: the demo model's")
    beside.add_argument("--clients", default="1,4,8")
    beside.add_argument("--tokens", type=int, default=64)
    beside.add_argument("--rounds", type=int, default=5)
    beside.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
