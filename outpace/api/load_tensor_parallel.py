"""Loads a Transformers checkpoint in all processes that torchrun has started; the first of them gets the model."""

from __future__ import annotations

import atexit
import gc
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from outpace.api import demo_weights
from outpace.api.load import stop_token_ids
from outpace.api.load_options import LoadOptions
from outpace.api.load_transformers import dtype_of, explained, quantization
from outpace.api.model import Model
from outpace.errors import UsageError
from outpace.models.adapt import adapt
from outpace.models.tensor_parallel import plan, processes, torchrun
from outpace.models.tensor_parallel.channel import FOREVER, Channel
from outpace.models.tensor_parallel.leader import FollowingProcess, Leader, SharedObject
from outpace.models.tensor_parallel.lm import LeaderLM
from outpace.models.tensor_parallel.shards import SplitEnds, settle


def load(name: str, options: LoadOptions) -> Model:
    """Return the model in the first process. The others serve it, and end with the first one.

    Call it from the main thread, which alone may handle signals.
    """
    _check(options)
    model, tokenizer = _read(name, options)
    settle(model)
    channel = Channel()
    channel.meet(FOREVER)  # reading takes as long as it takes
    lm = adapt(model, options.kv_cache_bytes, bool(options.bitwise), compile=False)
    ends = SplitEnds(model)
    if torchrun.rank():
        gc.enable()  # the command line turns it off until it has its model
        # Terminals and torchrun send signals to all processes. The first one ends in order, and then these do.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        FollowingProcess(channel, [lm, ends]).follow()
        raise SystemExit
    shared = LeaderLM(Leader(channel, 2), SharedObject(0, lm), SharedObject(1, ends))
    atexit.register(shared.close)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that `close` runs
    return Model(shared, tokenizer, stop_token_ids(model, tokenizer), Path(name).name)


def _check(options: LoadOptions) -> None:
    """Refuse what cannot be shared, and a wrong number of processes."""
    size, there = options.tensor_parallel, torchrun.size()
    for option in ("quantize", "adapter", "compile"):
        if getattr(options, option):
            raise UsageError(f"tensor_parallel does not go with {option}: leave one of them out")
    if size != there:
        raise UsageError(
            f"tensor_parallel={size} needs {size} processes, not {there}: start the program with torchrun "
            f"--nproc-per-node {size}"
        )
    if str(options.device).startswith("cpu") and torch.cuda.is_available():
        raise UsageError("tensor_parallel runs on the GPUs that it sees: hide them with CUDA_VISIBLE_DEVICES=''")


def _read(name: str, options: LoadOptions) -> tuple[Any, Any]:
    """Join the other processes, and read this one's part of a checkpoint, and the tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.distributed import DistributedConfig

    assert options.tensor_parallel is not None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = demo_weights.fetch(name) if name in demo_weights.DEMO_MODELS else name
    with explained(name):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        if (kind := quantization(config)) is not None:
            raise UsageError(f"{name!r} is quantised ({kind}), so it runs in one process: leave tensor_parallel out")
        plan.check(config, options.tensor_parallel)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        processes.join(device.type == "cuda", processes.PATIENCE)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype_of(options.dtype, device), trust_remote_code=False,
            distributed_config=DistributedConfig(tp_size=options.tensor_parallel),
        )  # fmt: skip
    return model, tokenizer
