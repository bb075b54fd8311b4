"""The heads that come with the repository: there for the demo model, small, and worth asking."""

from __future__ import annotations

import pytest

from outpace.api.model import Model
from outpace.heads import store
from outpace.storage import weights

LARGEST = 16_000_000  # bytes
PROMPT = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples does he have?"}]


def test_each_is_small_and_says_how_it_was_made() -> None:
    files = sorted(weights.CHECKOUT.glob(f"*/{store.WEIGHTS}"))
    assert len(files) == len(store.KINDS)
    for file in files:
        assert file.stat().st_size < LARGEST
        assert store.about(file.parent)["notes"]["settings"]["steps"] > 0


@pytest.mark.parametrize("kind", store.KINDS)
def test_a_method_finds_its_head_which_is_often_right(kind: str, smollm2: Model) -> None:
    plain, done = (smollm2.generate(PROMPT, method=method, max_tokens=20) for method in ("plain", kind))
    assert done.tokens == plain.tokens
    assert done.stats.tokens_per_pass > 1.25  # an untrained one is hardly ever right
