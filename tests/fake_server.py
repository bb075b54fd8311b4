"""A small OpenAI-compatible server on a toy model, with bugs that can be planted."""

from __future__ import annotations

import json
import threading
from collections import Counter
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

from outpace.api.model import Model
from outpace.sampling.processors import CountPenalty, LogitBias
from outpace.sampling.sampler import Processor, Sampler
from outpace.sampling.settings import Sampling
from outpace.testing import ByteTokenizer, ToyLM

VOCAB = 128  # ASCII, so that every token has a text of its own
KEY = "secret"
PATIENCE = 5.0  # seconds that a request waits for company, where the bug needs some


def toy() -> Model:
    return Model(ToyLM(vocab=VOCAB), ByteTokenizer(), name="toy")


class Fake(ThreadingHTTPServer):
    """Bugs act only while speculation is on: `{"speculative": false}` in a request turns it off."""

    daemon_threads = True

    def __init__(self, *bugs: str, crowd_after: int = 0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bugs = frozenset(bugs)
        self.lm = ToyLM(vocab=VOCAB)
        self.logits = cache(self._logits)
        self.crowd_after = crowd_after  # requests that come alone, before those that come together
        self.asked = Counter[str]()  # requests so far, by prompt
        self.lock, self.company = threading.Lock(), threading.Condition()
        self.inside, self.served, self.released = 0, 0, threading.Event()
        self.bodies: list[dict[str, Any]] = []

    def __enter__(self) -> Fake:
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()
        self.thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def _logits(self, tokens: tuple[int, ...]) -> Tensor:
        return self.lm.run(list(tokens))[0][-1]

    def crowded(self) -> bool:
        """Whether another request is here at the same time."""
        with self.company:
            self.inside, self.served = self.inside + 1, self.served + 1
            self.company.notify_all()
            crowd = self.served > self.crowd_after
            together = crowd and self.company.wait_for(
                lambda: self.inside > 1 or self.served > self.crowd_after + 1, PATIENCE
            )
            self.inside -= 1
            return together


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Fake

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.send(*self.refused() or (200, {"data": [{"id": "toy"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.send(*self.refused() or self.answer(body))

    def send(self, status: int, data: Any) -> None:
        payload = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def refused(self) -> tuple[int, Any] | None:
        bugs = self.server.bugs
        if "401" in bugs and self.headers.get("Authorization") != f"Bearer {KEY}":
            return 401, {"error": {"message": "Incorrect API key"}}
        if "500" in bugs:
            return 500, {"error": {"message": "CUDA out of memory"}}
        if "garbage" in bugs:
            return 200, b"<html>hello</html>"
        if "other JSON" in bugs and self.command == "POST":
            return 200, {"choices": [{"words": "?"}]}
        if "slow" in bugs:
            self.server.released.wait(30)
        if "no completions" in bugs and self.path == "/v1/completions":
            return 404, {"detail": "Not Found"}
        known = ("/v1/models", "/v1/completions", "/v1/chat/completions")
        return None if self.path in known else (404, {"detail": "Not Found"})

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        bugs = self.server.bugs
        for name in ("logprobs", "return_token_ids", "logit_bias", "top_k"):
            if f"refuses {name}" in bugs and name in body:
                return 400, {"error": {"message": f"unrecognized argument: {name}"}}
        chat = self.path.endswith("chat/completions")
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        count = 1 if self.bug("n", body) else body.get("n", 1)
        written = [self.write(prompt, body, stream) for stream in range(count)]
        usage = {"completion_tokens": sum(len(tokens) for tokens, *_ in written)}
        speculates = body.get("speculative", True) or "deaf" in bugs
        timings = {"draft_n_accepted": 3} if speculates and "says what it accepts" in bugs else {}
        choices = [self.choice(prompt, body, chat, *one) for one in written]
        return 200, {"choices": choices, "usage": usage, "timings": timings}

    def bug(self, name: str, body: dict[str, Any]) -> bool:
        return name in self.server.bugs and body.get("speculative", True)

    def write(self, prompt: str, body: dict[str, Any], stream: int) -> tuple[list[int], str, str]:
        """Tokens, text and the reason why it ended."""
        sampler = self.sampler(prompt, body, stream)
        text, start, stops = list(prompt.encode()), len(prompt), body.get("stop") or []
        wrong_at = self.wrong_at(prompt, body)
        most = body["max_tokens"] + self.bug("max_tokens", body)
        overshoot = self.bug("stop", body)
        for place in range(most):
            if place == 1 and self.bug("draws of guesses", body) and not sampler.greedy:
                sampler = Sampler(Sampling(temperature=3.0, seed=sampler.seed))
            scores = sampler.noised(sampler.process(self.server.logits(tuple(text)), text), len(text))
            text.append(int(scores.topk(2).indices[1] if place == wrong_at else scores.argmax()))
            said = ByteTokenizer().decode(text[start:])
            ended = [stop for stop in stops if stop in (said[:-2] if overshoot else said)]
            if ended:
                return text[start:], said if overshoot else said[: said.index(ended[0])], "stop"
        return text[start:], said, "length"

    def wrong_at(self, prompt: str, body: dict[str, Any]) -> int:
        with self.server.lock:
            self.server.asked[prompt] += 1
            odd = self.server.asked[prompt] % 2
        if self.bug("greedy", body) and body["temperature"] == 0:
            return 5
        if self.bug("random", body) and odd:
            return 3
        return 2 if self.bug("concurrent", body) and self.server.crowded() else -1

    def sampler(self, prompt: str, body: dict[str, Any], stream: int) -> Sampler:
        names = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        given = {name: neutral if self.bug(name, body) else body.get(name, neutral) for name, neutral in names.items()}
        given["top_k"] = max(0, given["top_k"])
        temperature = 0.0 if self.bug("temperature", body) else body["temperature"]
        seed = body.get("seed", 0) + 1000 * self.server.asked[prompt] * self.bug("seed", body)
        processors: list[Processor] = []
        if body.get("presence_penalty") and not self.bug("presence_penalty", body):
            processors.append(CountPenalty(body["presence_penalty"], 0.0, len(prompt)))
        if body.get("logit_bias") and not self.bug("logit_bias", body):
            processors.append(LogitBias({int(token): bias for token, bias in body["logit_bias"].items()}))
        return Sampler(Sampling(temperature, seed=seed, **given), processors, stream)

    def choice(self, prompt: str, body: dict[str, Any], chat: bool, tokens: list[int], text: str, why: str) -> Any:
        out: dict[str, Any] = {"message": {"content": text}} if chat else {"text": text}
        out["finish_reason"] = why
        if body.get("return_token_ids") and "no ids" not in self.server.bugs:
            out["token_ids"] = tokens
        if body.get("logprobs") and "ignores logprobs" not in self.server.bugs:
            out["logprobs"] = self.logprobs(list(prompt.encode()), body, chat, tokens)
        return out

    def logprobs(self, text: list[int], body: dict[str, Any], chat: bool, tokens: list[int]) -> Any:
        rows = []
        for place, token in enumerate(tokens):
            logprobs = self.server.logits(tuple(text + tokens[:place])).log_softmax(-1)
            if self.bug("temperature of logprobs", body):
                logprobs = (logprobs * 2).log_softmax(-1)
            best = logprobs.topk(5).indices.tolist()
            rows.append((chr(token), logprobs[token], {chr(t): float(logprobs[t]) for t in {*best, token}}))
        blank = len(rows) if self.bug("zeros", body) else 0
        if self.bug("zeros of guesses", body):
            blank = len(rows) // 2
        rows[:blank] = [(text, torch.tensor(0.0), {}) for text, *_ in rows[:blank]]
        if not chat:
            return {
                "tokens": [r[0] for r in rows],
                "token_logprobs": [float(r[1]) for r in rows],
                "top_logprobs": [r[2] for r in rows],
            }
        tops = [[{"token": text, "logprob": value} for text, value in row[2].items()] for row in rows]
        return {
            "content": [
                {"token": r[0], "logprob": float(r[1]), "top_logprobs": top} for r, top in zip(rows, tops, strict=True)
            ]
        }
