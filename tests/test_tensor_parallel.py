"""One model on two processes, which share it through gloo: the texts of one process, by every method.

Sums are split between the processes, so logits differ in their last bits from those of one process. In float64 no two
tokens of these models are that close, so texts are equal.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import outpace
from outpace.api.model import Model
from outpace.errors import UnsupportedModel, UsageError
from outpace.models.tensor_parallel import plan, processes
from outpace.models.tensor_parallel.lm import LeaderLM
from outpace.models.tensor_parallel.processes import ProcessLost
from tests.benchmark_scripts import numbers
from tests.conftest import settings_of
from tests.tensor_parallel import KINDS, PATIENCE, PROBE, save, shared_logits, shared_model
from tests.test_docs import blocks
from tests.tiny_models import GPT, GROUPED, build

ROOT = Path(__file__).parents[1]
PROMPTS = [[5, 17, 33, 2, 99, 50] * 3, [7], [*range(40)], [5, 17, 33]]
# No draft, remembered text, several kinds, a model of its own, the first layers, slices of the layers, a head.
METHODS = ["plain", "suffix", "auto", "draft", "layerskip", "pruned", "eagle3"]
TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
SAMPLED = {"temperature": 1.0, "top_p": 0.9, "seed": 3}


class Pair(NamedTuple):
    """A model in one process, the same in two, and the second of these."""

    whole: Model
    shared: Model
    other: subprocess.Popen[bytes]
    logits: dict[str, Tensor]  # of each kind of model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    for kind in KINDS:
        save(kind, folder)
    numbers(folder / "llama")
    return folder


@pytest.fixture(scope="module")
def pair(checkpoints: Path) -> Iterator[Pair]:
    """Two processes, as torchrun would start them; this one is the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "tests.tensor_parallel", str(checkpoints)]
    other = subprocess.Popen(command, cwd=ROOT, env=os.environ | given | {"RANK": "1", "LOCAL_RANK": "1"})
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        try:
            processes.join(False, PATIENCE)
            logits = {kind: shared_logits(checkpoints / kind) for kind in KINDS}
            shared = shared_model(checkpoints)
            whole = outpace.load(checkpoints / "llama", dtype="float64", compile=False)
            yield Pair(whole, shared, other, logits)
            lm_of(shared).close()
        finally:
            signal.signal(signal.SIGTERM, handler)
            other.kill()


def lm_of(model: Model) -> LeaderLM:
    assert isinstance(model.lm, LeaderLM)
    return model.lm


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_one_process(checkpoints: Path, pair: Pair, kind: str) -> None:
    whole = AutoModelForCausalLM.from_pretrained(checkpoints / kind)
    with torch.no_grad():
        expected = whole(PROBE).logits
    close = 1e-3 if expected.dtype == torch.float32 else 1e-10
    torch.testing.assert_close(pair.logits[kind], expected, rtol=close, atol=close)


def test_each_process_has_its_part_of_the_weights_and_of_the_cache(pair: Pair) -> None:
    whole, ours = pair.whole.memory(100), pair.shared.memory(100)
    assert whole is not None and ours is not None
    assert ours.weights < 0.55 * whole.weights
    assert ours.cache == whole.cache / 2


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_those_of_one_process(pair: Pair, method: str) -> None:
    """Greedy and sampled requests in one batch, of prompts of different lengths."""
    draft = pair.whole.lm.layers.slice([0, 2])  # type: ignore[union-attr]
    for settings in ({}, SAMPLED):
        given = {"max_tokens": 12, **settings}
        expected = [done.tokens for done in pair.whole.generate(PROMPTS, method="plain", **given)]
        found = pair.shared.generate(PROMPTS, **given, **settings_of(method, draft))
        assert [done.error for done in found] == [None] * len(PROMPTS)
        assert [done.tokens for done in found] == expected


def test_embeddings_are_whole(pair: Pair) -> None:
    ours, whole = pair.shared.lm.embeddings, pair.whole.lm.embeddings
    assert ours is not None and whole is not None
    assert torch.equal(ours.embed, whole.embed) and torch.equal(ours.unembed, whole.unembed)


def test_the_reference_runs_on_both_processes(pair: Pair) -> None:
    ours, whole = pair.shared.lm.reference(), pair.whole.lm.reference()
    torch.testing.assert_close(ours.native(PROMPTS[0], 3), whole.native(PROMPTS[0], 3))
    torch.testing.assert_close(ours.precise(PROMPTS[0], 3), whole.precise(PROMPTS[0], 3))


def test_a_full_cache_ends_one_request_alike_on_both_processes(pair: Pair) -> None:
    too_long, fits = pair.shared.generate([[*range(100)] * 4, PROMPTS[0]], max_tokens=4, method="plain")
    assert too_long.error is not None and "the KV cache has room for" in too_long.error
    assert fits.tokens == pair.whole.generate(PROMPTS[0], max_tokens=4, method="plain").tokens


def test_the_example_of_the_guide_runs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = blocks("docs/guide/tensor-parallel.md")
    monkeypatch.setattr(outpace, "load", lambda name, tensor_parallel: pair.shared)
    scope: dict[str, object] = {}
    exec(source, scope)
    assert scope["lm"] is pair.shared


def test_a_dead_process_fails_requests_and_hangs_none(pair: Pair) -> None:
    """The last test of the pair."""
    pair.other.send_signal(signal.SIGKILL)
    pair.other.wait(30)
    for _ in range(2):
        with pytest.raises(ProcessLost, match="has ended or does not answer: start all of them again"):
            pair.shared.generate(PROMPTS[0], max_tokens=4)


def test_the_command_starts_its_processes(checkpoints: Path) -> None:
    given = ["--model", str(checkpoints / "llama"), "--dtype", "float64", "--method", "suffix", "--max-tokens", "8"]
    command = [sys.executable, "-m", "outpace", "generate", "5 17 33", *given, "--json", "--tensor-parallel", "2"]
    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    whole = outpace.load(checkpoints / "llama", dtype="float64")
    assert json.loads(done.stdout)["tokens"] == whole.generate("5 17 33", max_tokens=8).tokens


def test_what_cannot_be_shared_is_said_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("llama", **GROUPED).config.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(UsageError, match="does not divide the 4 attention heads and 2 key-value heads of Llama"):
        plan.check(config, 3)
    with pytest.raises(UnsupportedModel, match="no tensor-parallel plan for GPT2LMHeadModel"):
        plan.check(AutoConfig.for_model("gpt2", **GPT), 2)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match="needs 2 processes, not 1: start the program with torchrun --nproc-per-node"):
        outpace.load(tmp_path, tensor_parallel=2)
    with pytest.raises(UsageError, match="does not go with quantize"):
        outpace.load(tmp_path, tensor_parallel=2, quantize="int8")
