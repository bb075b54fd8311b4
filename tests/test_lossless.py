"""The promise: every lossless method of the registry gives the tokens of plain decoding.

A new method is tested here by being registered. Equality is `==` on token ids, greedy and sampled, alone and in ragged
batches, on a toy in float64 and on SmolLM2 in float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation import NoRepeatNGramLogitsProcessor

from outpace import registry
from outpace.api.model import Model
from outpace.api.request import Request
from outpace.api.stream import Completion
from outpace.core.lm import LM
from tests.conftest import LOSSLESS as METHODS, settings_of

TREES: dict[str, dict[str, Any]] = {
    "draft": {"width": 3},
    "layerskip": {"width": 3},
    "pruned": {"width": 3},
    "mtp": {"width": 3, "nodes": 6},
    "medusa": {"template": "0+1+0-0+0-1+1-0+0-0-0"},
    "ngram": {"matches": 3},
    "suffix": {"width": 3},
    "prediction": {"prediction": [5, 9, 4, 2, 7, 1, 3, 8, 6, 1, 2] * 4},
    "graft": {"inner": "draft:width=3,depth=4,nodes=8", "nodes": 16},
    "via_sd": {"inner": "draft:width=3,depth=4"},
    "auto": {"draft": None, "candidates": "ngram+recycling+lookahead"},
}
PROMPTS = [[1, 2, 3, 1, 2], [5], [9, 8, 7, 6] * 5, list(range(40))]


class Alternate(LogitsProcessor):
    """A processor as a user may write one: it depends on the length of the prefix and on its last token."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        assert input_ids.shape[0] == 1
        parity = (torch.arange(scores.shape[-1]) + input_ids.shape[1]) % 2 == 0
        return scores.masked_fill(parity & (torch.arange(scores.shape[-1]) != input_ids[0, -1]), -3.0)


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 11},
    "filtered": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95, "seed": 5},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "temperature": 0.7},
    "constraints": {
        "logit_bias": {3: 2.0, 4: -5.0},
        "bad_words": [[7], [1, 2]],
        "min_tokens": 20,
        "stop_token_ids": [9, 11],
    },
    "logits_processors": {
        "logits_processors": [Alternate(), NoRepeatNGramLogitsProcessor(3)],
        "temperature": 0.8,
        "seed": 2,
    },
}


KNOWN: dict[Any, list[Completion]] = {}


def tokens(completions: Any) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def plainly(model: Model, prompts: list[Any], given: dict[str, Any]) -> list[Completion]:
    """Plain decoding of each prompt alone: all methods are compared with the same, so it runs once for all."""
    key = id(model), repr(prompts), repr(sorted(given.items(), key=lambda item: item[0]))
    if key not in KNOWN:
        KNOWN[key] = [model.generate(prompt, method="plain", **given) for prompt in prompts]
    return KNOWN[key]


def variants(name: str) -> list[dict[str, Any]]:
    return [{}, TREES[name]] if name in TREES else [{}]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", METHODS)
def test_toy(name: str, setting: str, toy: Model, toy_draft: LM) -> None:
    given = {**SETTINGS[setting], "max_tokens": 30}
    alone = tokens(plainly(toy, PROMPTS, given))
    for options in variants(name):
        method = settings_of(name, toy_draft) | options
        assert [toy.generate(prompt, **method, **given).tokens for prompt in PROMPTS] == alone
        assert tokens(toy.generate(PROMPTS, **method, **given)) == alone


@pytest.mark.parametrize("policy", sorted(registry.POLICIES))
@pytest.mark.parametrize("name", METHODS)
def test_toy_under_every_policy(name: str, policy: str, toy: Model, toy_draft: LM) -> None:
    given = {"temperature": 0.9, "seed": 3, "max_tokens": 30}
    plain = tokens(plainly(toy, PROMPTS, given))
    assert tokens(toy.generate(PROMPTS, **settings_of(name, toy_draft), policy=policy, **given)) == plain


def test_toy_batch_of_everything(toy: Model, toy_draft: LM) -> None:
    """Rows with different methods, depths, policies and sampling settings share one batch."""
    rows, alone = [], []
    for i, name in enumerate(METHODS):
        for j, setting in enumerate(SETTINGS.values()):
            given = {**setting, "max_tokens": 10 + 7 * ((i + j) % 3)}
            prompt = PROMPTS[(i + j) % len(PROMPTS)]
            policy = f"fixed:depth={1 + (i + 2 * j) % 5}"
            rows.append(Request.from_keywords(prompt, {**settings_of(name, toy_draft), "policy": policy, **given}))
            alone.append(toy.generate(prompt, method="plain", **given).tokens)
    assert tokens(toy.generate(rows)) == alone


TEXTS = [
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    [{"role": "user", "content": "Count from one to ten, then count from one to ten again."}],
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
]


def trained(name: str, draft: LM) -> dict[str, Any]:
    """With the heads that come with the repository, whose guesses are kept now and then; the toy has random ones."""
    method = settings_of(name, draft)
    return method | ({"head": None} if "head" in method else {})


@pytest.mark.parametrize("setting", ["greedy", "sampled"])
@pytest.mark.parametrize("name", METHODS)
def test_smollm2(name: str, setting: str, smollm2: Model, smollm2_draft: LM) -> None:
    given = {**SETTINGS[setting], "max_tokens": 16}
    plain = plainly(smollm2, TEXTS, given)
    method = trained(name, smollm2_draft)
    for options in variants(name):
        batch = smollm2.generate(TEXTS, **(method | options), **given)
        assert tokens(batch) == tokens(plain)
        assert [c.text for c in batch] == [c.text for c in plain]
    alone = smollm2.generate(TEXTS[1], **method, **given)
    assert alone.tokens == plain[1].tokens


@pytest.mark.parametrize("name", METHODS)
def test_smollm2_grammar(name: str, smollm2: Model, smollm2_draft: LM) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    prompts = [[{"role": "user", "content": f"Describe {city} as JSON."}] for city in ("Paris", "Rome")]
    given = {"json_schema": schema, "max_tokens": 40, "temperature": 0.7, "seed": 1}
    plain = plainly(smollm2, prompts, given)
    method = trained(name, smollm2_draft) | TREES.get(name, {})
    assert tokens(smollm2.generate(prompts, **method, **given)) == tokens(plain)
