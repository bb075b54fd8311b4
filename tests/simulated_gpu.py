"""A GPU that is simulated on a CPU: captured functions run anew, and what a GPU would wait for or launch is counted."""

from __future__ import annotations

import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

import outpace
from outpace.api.model import Model
from outpace.models.compiled import choices, cuda_graph, graph_pass
from outpace.models.compiled.choices import Choices
from outpace.models.compiled.cpu import CpuRunner
from outpace.models.compiled.cuda_graph import GraphRunner
from outpace.models.compiled.drafts import draft_chain
from outpace.models.compiled.drafts.draft_chain import DraftChains
from outpace.models.compiled.drafts.draft_tree import DraftTrees
from outpace.models.compiled.graph_pass import CapturedChoice, CapturedPass, ChoiceKey, GraphKey
from outpace.models.compiled.run_ahead import GraphsAhead
from outpace.models.hf.head_lm import HeadLM
from outpace.models.hf.lm import TransformersLM
from outpace.models.kernels import noised as kernels_noised, sample
from outpace.models.segment import Segment, SegmentOutput
from outpace.sampling.noise import WORD, mix

READS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero", "masked_select"}
FACTORIES = {"tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "eye"}
VIEWS = {
    "view", "reshape", "transpose", "permute", "unbind", "split", "chunk", "expand", "expand_as", "unsqueeze",
    "flatten", "unflatten", "narrow", "detach", "size", "dim", "stride", "numel", "__get__", "__len__", "view_as",
    "contiguous", "__getitem__", "untyped_storage", "data_ptr", "is_contiguous", "squeeze", "element_size", "__set__",
}  # fmt: skip
POOL = "pool"


class HostLog(TorchFunctionMode):
    """Counts, by place in our code, where the host would wait for the device and what it would launch there.

    A tensor is the host's if it was made without a device, or of such tensors alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.launches = Counter[str](), Counter[str]()
        self.inside = 0  # of a captured function, which a GPU would replay

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), getattr(func, "__name__", "")
        given = [item for item in _flat((args, kwargs.values())) if isinstance(item, Tensor)]
        theirs = [tensor for tensor in given if not getattr(tensor, "of_host", False)]
        place = f"{name} {_place()}"
        if name in FACTORIES and not given:
            if kwargs.get("device") is None:
                _mark(result)
            else:
                (self.waits if name in ("tensor", "as_tensor") else self.launches)[place] += not self.inside
        elif not theirs:
            if name in ("to", "cuda"):
                self.waits[place] += not (self.inside or kwargs.get("non_blocking"))
                return result.clone()
            _mark(result)
        elif name in READS or (_copies(name, args, given, theirs) and not kwargs.get("non_blocking")):
            assert not self.inside, f"a captured function waits for the device: {place}"
            self.waits[place] += 1
        elif name not in VIEWS:
            self.launches[place] += not self.inside
        return result


LOGS: list[HostLog] = []  # those that are open


@contextmanager
def host_log() -> Iterator[HostLog]:
    with HostLog() as log:
        LOGS.append(log)
        try:
            yield log
        finally:
            LOGS.remove(log)


def _copies(name: str, args: Any, given: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether numbers of the host go to the device here, outside of what is sent without waiting."""
    if name not in ("copy_", "__setitem__", "__getitem__"):
        return False
    lists = name != "copy_" and any(
        isinstance(item, list) for item in (args[1] if type(args[1]) is tuple else args[1:2])
    )
    return lists or len(theirs) < len(given)


def _mark(result: Any) -> None:
    for found in _flat((result,)):
        if isinstance(found, Tensor):
            found.of_host = True  # type: ignore[attr-defined]


def _flat(given: Any) -> Iterator[Any]:
    for item in given:
        if isinstance(item, Tensor | str) or not hasattr(item, "__iter__"):
            yield item
        else:
            yield from _flat(item)


def _place() -> str:
    ours = [frame for frame in traceback.extract_stack() if "/outpace/" in frame.filename]
    return f"{ours[-1].filename.split('/outpace/')[-1]}:{ours[-1].lineno}" if ours else "?"


class Captured:
    """Stands for a graph: a function, and memory that every run writes anew."""

    def __init__(self, function: Callable[[], Any]):
        self.function = function
        self.left = _kept(self._run())

    @torch.no_grad()
    def _run(self) -> Any:
        for log in LOGS:
            log.inside += 1
        try:
            return self.function()
        finally:
            for log in LOGS:
                log.inside -= 1

    def __call__(self) -> Any:
        _write(self.left, self._run())
        for log in LOGS:
            log.launches["graph"] += not log.inside
        return self.left


def _kept(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.clone()
    if isinstance(found, dict):
        return {name: _kept(value) for name, value in found.items()}
    return type(found)(*map(_kept, found)) if isinstance(found, tuple) else found


def _write(there: Any, found: Any) -> None:
    if isinstance(found, Tensor):
        there.copy_(found)
    elif isinstance(found, dict | tuple):
        for name in found if isinstance(found, dict) else range(len(found)):
            _write(there[name], found[name])


def capture(function: Callable[[], Any], memory: Any) -> Captured:
    assert memory == POOL
    return Captured(function)


class Instant:
    """An event on a device that is always done."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def unpinned() -> Iterator[None]:
    """Let memory be asked for as pinned, which it cannot be without a GPU."""
    zeros = torch.zeros
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros", lambda *sizes, pin_memory=False, **given: zeros(*sizes, **given))
        yield


class SimulatedChoices(Choices):
    """Choices behind simulated passes."""

    def _capture(self, captured: CapturedPass, key: ChoiceKey) -> CapturedChoice:
        with unpinned():
            return super()._capture(captured, key)


class SimulatedGraphs(GraphRunner):
    """A runner that believes it has graphs, on the compiled layers of a runner for a CPU."""

    def __init__(self, lm: TransformersLM):
        self.__dict__.update(lm.runner.__dict__)
        self._graphs, self._generation, self.graph_memory = OrderedDict(), self.cache.generation, POOL
        self.choices, self._ahead = SimulatedChoices(lm, lambda: POOL), GraphsAhead(self)
        self.drafts, self.run_ahead = self, self._ahead
        self._trees, self._chains = DraftTrees(self), DraftChains(self)
        self.capture_seconds, self.most_tokens, self._chunk = 0.0, 512, 512

    def prompt_pass(self, segments: Seq[Segment], taps: tuple[int, ...]) -> list[SegmentOutput]:
        return self.lm.eager.forward(segments, taps)  # the compiled layers of a CPU take no prompts

    def attach(self, head: PreTrainedModel) -> TransformersLM:
        lm = HeadLM.of_head(head)
        assert CpuRunner.install(lm) is not None
        lm.runner = SimulatedGraphs(lm)
        return lm

    def _capture(self, key: GraphKey) -> CapturedPass:
        with unpinned():
            return super()._capture(key)


def noise(words: Tensor, tokens: Tensor) -> Tensor:
    """What `noise.gumbel` gives, for rows with noise words of their own."""  # [rows, 2], [vocab] -> [rows, vocab]
    a, b = words[:, :1], words[:, 1:]
    uniform = mix(mix(tokens * 0x9E3779B1 + a & WORD) ^ b)
    return -torch.log(-torch.log((uniform.double() + 0.5) / 2**32))


def noised(logits: Tensor, words: Tensor, temperature: Tensor, ids: Tensor | None) -> Tensor:
    """The kernel of this name, which takes long where it is interpreted."""
    tokens, warm = torch.arange(logits.shape[1]) if ids is None else ids, temperature[:, None]
    scores = (logits / warm.float()).double() + noise(words, tokens)
    return torch.where(warm == 0, logits.double(), scores).float()


def choose(logits: Tensor, words: Tensor, temperature: Tensor, block: int) -> Tensor:
    """The kernel of this name, the same way."""
    logits, warm = logits.float(), torch.where(temperature == 0, 1.0, temperature)[:, None].float()
    tokens = noised(logits, words, temperature, None).argmax(-1)
    probs = (logits / warm).softmax(-1).gather(1, tokens[:, None])[:, 0]
    return torch.stack([tokens.double(), logits.amax(-1).double(), probs.double(), torch.ones(len(tokens)).double()])


def simulate(model: Model, patch: pytest.MonkeyPatch) -> Model:
    """Make this model, compiled for a CPU, run as on a GPU until the patch is undone."""
    for place in (graph_pass, cuda_graph, draft_chain, choices):
        patch.setattr(place, "capture", capture)
    patch.setattr(sample, "launch", choose)
    patch.setattr(kernels_noised, "launch", noised)
    patch.setattr(torch.cuda, "Event", Instant)
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    lm: Any = model.lm
    lm.clear()
    patch.setattr(lm, "runner", SimulatedGraphs(lm))
    return Model(lm)


def compiled(model: PreTrainedModel) -> Model:
    """Wrap a model with layers that are compiled for a CPU."""
    found = outpace.wrap(model.float(), compile=True)
    assert isinstance(found.lm.runner, CpuRunner)  # type: ignore[attr-defined]
    return found
