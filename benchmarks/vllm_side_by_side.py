"""vLLM and Outpace side by side: the same weights, prompts and sampling on one GPU, in one table.

    python benchmarks/vllm_side_by_side.py random-8b  # written first if there is no such folder: 16 GB
    python benchmarks/vllm_side_by_side.py MODEL --requests 1 64 --settings greedy --lengths 512 --rounds 1
    python benchmarks/vllm_side_by_side.py MODEL --vllm-python OTHER/bin/python  # where vLLM has its own environment

Needs vLLM 0.26 or later; without it, its column says why it is empty. Prompts are random token ids and no tokenizer is
used. No text ends early, and neither engine keeps prompts from run to run. Each engine runs alone in its own process,
since both want the whole memory of the GPU.

The decode rate is the difference of a long and a short run: reading the prompts takes the same time in both. The time
to the first token is that of a run of one token, for several prompts until the last one has it. The first run of each
kind warms up, and the best of the others counts.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# Imports of either engine are inside functions: its environment may not have the other.
ENGINES = ("outpace", "vllm")
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}
PROMPT = 128  # tokens of the prompts of decode rates
MANY = 64  # prompts whose first tokens are timed together
ROOM = 16_384  # tokens of a text
SECONDS, RATE = "ms to the first token", "tokens/s"

Report = dict[str, Any]  # measured (case -> number), versions, gpu; skipped: why there is nothing


class Engine(Protocol):
    """An engine that completes prompts, each with exactly `tokens` tokens."""

    versions: dict[str, str]

    def complete(self, prompts: list[list[int]], tokens: int, settings: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    count: int  # prompts
    length: int  # tokens of each
    setting: str = ""  # of SETTINGS; "": the time to the first token

    @property
    def name(self) -> str:
        if self.setting:
            return f"{RATE}, {self.count} requests, {self.setting}"
        return f"{SECONDS}, {self.count} x {self.length:,} tokens"


class OutpaceEngine:
    """Outpace, with passes compiled on a GPU."""

    def __init__(self, folder: Path, asked: argparse.Namespace):
        import torch
        import transformers

        import outpace

        device = "cuda" if torch.cuda.is_available() else "cpu"
        network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
        self.model = outpace.wrap(network, compile=device == "cuda")
        self.model.max_batch = max(*asked.requests, MANY)
        self.model.warm_up()
        self.method = asked.method
        self.versions = {"outpace": outpace.__version__, "torch": torch.__version__}

    def complete(self, prompts: list[list[int]], tokens: int, settings: dict[str, Any]) -> None:
        self.model.clear_cache()
        done = self.model.generate(prompts, method=self.method, max_tokens=tokens, ignore_eos=True, **settings)
        _check([len(completion.tokens) for completion in done], tokens)


class VllmEngine:
    """vLLM's offline engine, with its defaults."""

    def __init__(self, folder: Path, asked: argparse.Namespace):
        import torch

        vllm: Any = importlib.import_module("vllm")
        self.llm: Any = vllm.LLM(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=asked.room,
            max_num_seqs=max(*asked.requests, MANY), enable_prefix_caching=False, gpu_memory_utilization=asked.memory,
        )  # fmt: skip
        self.params: Callable[..., Any] = vllm.SamplingParams
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}

    def complete(self, prompts: list[list[int]], tokens: int, settings: dict[str, Any]) -> None:
        # No seed: vLLM samples requests with seeds of their own one by one.
        params = self.params(max_tokens=tokens, ignore_eos=True, detokenize=False, **settings)
        done = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        _check([len(output.outputs[0].token_ids) for output in done], tokens)


def _check(found: list[int], tokens: int) -> None:
    if set(found) != {tokens}:
        raise SystemExit(f"texts have {sorted(set(found))} tokens, not {tokens}")


def cases(asked: argparse.Namespace) -> list[Case]:
    first = [Case(1, length) for length in asked.lengths] + [Case(MANY, min(asked.lengths))]
    return [*(Case(count, PROMPT, setting) for setting in asked.settings for count in asked.requests), *first]


def prompts_of(case: Case, vocab: int) -> list[list[int]]:
    """Random prompts, the same for both engines and different from each other."""
    draw = random.Random(f"{case.count}/{case.length}")
    return [[draw.randrange(10, vocab) for _ in range(case.length)] for _ in range(case.count)]


def measure(engine: Engine, case: Case, vocab: int, asked: argparse.Namespace) -> float:
    """Return tokens per second of decoding, or milliseconds to the first token."""
    prompts = prompts_of(case, vocab)

    def seconds(tokens: int) -> float:
        settings, times = SETTINGS[case.setting or "greedy"], []
        for _ in range(asked.rounds + 1):
            start = time.perf_counter()
            engine.complete(prompts, tokens, settings)
            times.append(time.perf_counter() - start)
        return min(times[1:])

    if not case.setting:
        return 1e3 * seconds(1)
    spent = seconds(asked.long) - seconds(asked.short)
    return case.count * (asked.long - asked.short) / spent


def report(asked: argparse.Namespace) -> None:
    """Measure one engine in this process, and write every number at once, in case that the time ends."""
    if importlib.util.find_spec(asked.engine) is None:
        asked.report.write_text(json.dumps({"skipped": f"{asked.engine} is not installed"}))
        return
    import torch

    engine: Engine = (OutpaceEngine if asked.engine == "outpace" else VllmEngine)(asked.model, asked)
    vocab = json.loads((asked.model / "config.json").read_text())["vocab_size"]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    found: Report = {"measured": {}, "versions": engine.versions, "gpu": gpu}
    for case in cases(asked):
        found["measured"][case.name] = measure(engine, case, vocab, asked)
        asked.report.write_text(json.dumps(found))
        say(f"{asked.engine}: {case.name}: {found['measured'][case.name]:.1f}")


def alone(name: str, asked: argparse.Namespace, given: list[str]) -> Report:
    """Run this script for one engine in a process of its own, and read what it measured."""
    python = asked.vllm_python if name == "vllm" else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [python, __file__, *given, "--engine", name, "--report", str(path)]
        code = subprocess.run(command, check=False).returncode
        found: Report = json.loads(path.read_text()) if path.exists() else {}
    if code:
        found["skipped"] = f"{name} ended with code {code}; its messages are above"
    return found


def table(found: dict[str, Report], wanted: list[Case], command: str) -> str:
    """One row for each case; a ratio above 1 says that Outpace is faster."""
    ours, theirs = (found[name].get("measured", {}) for name in ENGINES)
    lines = ["| | Outpace | vLLM | ratio |", "|---|---|---|---|"]
    for case in wanted:
        a, b = ours.get(case.name), theirs.get(case.name)
        ratio = "" if a is None or b is None else f"{a / b if case.setting else b / a:.2f}"
        cells = ["" if number is None else f"{number:,.1f}" for number in (a, b)]
        lines.append(f"| {case.name} | {' | '.join(cells)} | {ratio} |")
    gpus = sorted({part["gpu"] for part in found.values() if "gpu" in part})
    versions = [
        f"{name} in an environment with " + ", ".join(f"{k} {v}" for k, v in part["versions"].items())
        for name, part in found.items() if "versions" in part
    ]  # fmt: skip
    skipped = [f"Left out: {part['skipped']}." for part in found.values() if "skipped" in part]
    return "\n".join([*lines, "", f"`{command}`, {', '.join(gpus)}; {'; '.join(versions)}.", *skipped])


def write_random(folder: Path, shape: str) -> None:
    """Write a Llama with random weights in bfloat16: a config and safetensors, without a tokenizer."""
    import torch
    from grown import SHAPES
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=131_072, tie_word_embeddings=False, rope_parameters=rope
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
    for weight in model.parameters():
        weight.data.fill_(1.0) if weight.dim() == 1 else weight.data.normal_(0, 0.02)
    model.save_pretrained(folder)


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a checkpoint; a random one is written if there is none")
    parser.add_argument("--shape", default="8b", help="shape of a random model, of benchmarks/grown.py")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64, 128, 256])
    parser.add_argument("--settings", choices=SETTINGS, nargs="+", default=list(SETTINGS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096, 15_000], help="tokens of prompts")
    parser.add_argument("--short", type=int, default=32, help="tokens of a short run")
    parser.add_argument("--long", type=int, default=160, help="tokens of a long run")
    parser.add_argument("--rounds", type=int, default=2, help="runs that count")
    parser.add_argument("--room", type=int, default=ROOM, help="longest text that vLLM is prepared for")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory that vLLM takes")
    parser.add_argument("--method", default="plain", help="method of Outpace")
    parser.add_argument("--vllm-python", default=sys.executable, help="Python with vLLM")
    parser.add_argument("--engine", choices=ENGINES, help="measure this engine alone, in this process")
    parser.add_argument("--report", type=Path, help="file for the numbers of `--engine`, in JSON")
    return parser


def main() -> None:
    given = sys.argv[1:]
    parser = arguments()
    asked = parser.parse_args(given)
    if (asked.engine is None) != (asked.report is None):
        parser.error("--engine and --report belong together")
    if asked.engine is not None:
        return report(asked)
    if not (asked.model / "config.json").exists():
        write_random(asked.model, asked.shape)
    found = {name: alone(name, asked, given) for name in ENGINES}
    say(f"\n{table(found, cases(asked), shlex.join(['python', 'benchmarks/vllm_side_by_side.py', *given]))}")


if __name__ == "__main__":
    main()
