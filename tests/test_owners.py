"""Requests of different owners learn nothing of each other: neither drafts nor a cached prefix are shared."""

from __future__ import annotations

from typing import Any

import pytest

from outpace.api.kept import Kept
from outpace.api.model import Model
from outpace.api.stream import Completion
from outpace.core.lm import LM
from outpace.testing import ToyLM
from tests.conftest import LOSSLESS, settings_of

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 6


def figures(model: Model, draft: LM, name: str, owner: str | None) -> tuple[list[int], int, int, int]:
    given: dict[str, Any] = {**settings_of(name, draft), "policy": "fixed", "max_tokens": 30}
    done: Completion = model.generate(PROMPT, owner=owner, **given)
    return done.tokens, done.stats.drafted, done.stats.passes, done.cached_tokens


@pytest.mark.parametrize("name", LOSSLESS)
def test_what_one_owner_has_written_does_not_speed_up_another(name: str, toy_draft: LM) -> None:
    model = Model(ToyLM())
    alone = figures(Model(ToyLM()), toy_draft, name, "b")
    for _ in range(2):
        figures(model, toy_draft, name, "a")
    assert figures(model, toy_draft, name, "b") == alone


def test_one_owner_is_sped_up_by_what_it_has_written(toy_draft: LM) -> None:
    model = Model(ToyLM())
    first = figures(model, toy_draft, "suffix", "a")
    again = figures(model, toy_draft, "suffix", "a")
    assert again[0] == first[0] and again[2] < first[2]
    assert (first[3], again[3]) == (0, len(PROMPT) - 1)


def test_samples_of_one_prompt_share_it() -> None:
    found = Model(ToyLM()).generate(PROMPT, n=3, temperature=1.0, max_tokens=4)
    assert [done.cached_tokens for done in found] == [0, len(PROMPT) - 1, len(PROMPT) - 1]


def test_methods_that_were_not_used_for_long_are_dropped() -> None:
    kept = Kept(most=2)
    first = kept.get("a", object)
    kept.get("b", object)
    assert kept.get("a", object) is first
    kept.get("c", object)
    assert kept.get("a", object) is first and len(list(kept)) == 2
