"""A decoding loop for Transformers: `model.generate(**inputs, custom_generate=outpace.custom_generate("ngram"))`.

Transformers prepares everything as for its own loop (logits processors, stopping criteria, limits). Only the loop is
replaced, and the result has the form that `generate` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outpace.api.load import wrap
from outpace.api.model import Model
from outpace.api.request import Request
from outpace.api.stream import Stream
from outpace.core.sequence import Limits, Sequence
from outpace.errors import RequestFailed, UsageError
from outpace.sampling.processors import CustomProcessor
from outpace.sampling.sampler import Sampler
from outpace.sampling.settings import Sampling


class Criteria:
    """Transformers' stopping criteria, checked after every committed token, so that they can cut an accepted draft."""

    def __init__(self, prompt: list[int], criteria: Any, device: torch.device):
        self.tokens, self.criteria, self.device = list(prompt), criteria, device
        self.stopped = False

    def push(self, token: int) -> None:
        self.tokens.append(token)
        self.stopped = bool(self.criteria(torch.tensor([self.tokens], device=self.device), None).all())


def custom_generate(method: str = "auto", **settings: Any) -> Callable[..., Any]:
    """Make a decoding loop for `generate`; `settings` are the method's options, `draft`, `policy` and `verifier`."""
    request = Request.from_keywords([0], {"method": method, **settings})
    models: dict[int, Model] = {}  # between calls, a model keeps its adapter, and its methods keep what they learned

    def decode(
        model: Any,
        input_ids: Tensor,  # [batch, length], padded on the left
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **rest: Any,
    ) -> Any:
        config = generation_config
        _check(config)
        if id(model) not in models:
            models.setdefault(id(model), wrap(model))
        # Transformers samples with torch's generator, so `torch.manual_seed` sets the seed here too.
        seed = int(torch.randint(2**62, ())) if config.do_sample else 0
        ours = replace(request, sampling=Sampling(temperature=1.0 if config.do_sample else 0.0, seed=seed))
        seqs = []
        for i, row in enumerate(_unpadded(input_ids, rest.get("attention_mask"))):
            seq = models[id(model)].sequence(replace(ours, prompt=row))
            seq.sampler = Sampler(
                ours.sampling, [CustomProcessor(logits_processor)] if logits_processor else [], stream=i
            )
            seq.limits = Limits(config.max_length - input_ids.shape[1], 0, _ids(config.eos_token_id))
            seq.watcher = Criteria(row, stopping_criteria, input_ids.device) if stopping_criteria else None
            seqs.append(seq)
        _run(models[id(model)], seqs, rest.get("streamer"))
        return _result(seqs, input_ids, config)

    return decode


def _check(config: Any) -> None:
    if config.num_beams > 1:
        raise UsageError("outpace does not support beam search; set num_beams=1")
    wanted = [n for n in ("scores", "logits", "attentions", "hidden_states") if getattr(config, f"output_{n}", False)]
    if wanted:
        raise UsageError(f"outpace does not return {', '.join(wanted)} from generate(); unset output_{wanted[0]}")


def _ids(value: Any) -> frozenset[int]:
    return frozenset() if value is None else frozenset(torch.as_tensor(value).flatten().tolist())


def _unpadded(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    return [(row if mask is None else row[mask[i].bool()]).tolist() for i, row in enumerate(ids)]


def _run(model: Model, seqs: list[Sequence], streamer: Any) -> None:
    if streamer is not None:
        streamer.put(torch.tensor(seqs[0].tokens))
    with Stream(model, seqs) as stream:
        for piece in stream:
            for token in piece.tokens if streamer is not None else ():
                streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    failed = [seq.error for seq in seqs if seq.error is not None]
    if failed:
        raise RequestFailed(failed[0])


def _result(seqs: list[Sequence], input_ids: Tensor, config: Any) -> Any:
    longest = max(len(seq.generated) for seq in seqs)
    pad = min(_ids(config.pad_token_id) or _ids(config.eos_token_id) or {0})
    rows = [seq.generated + [pad] * (longest - len(seq.generated)) for seq in seqs]
    sequences = torch.cat([input_ids, torch.tensor(rows, device=input_ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences)
