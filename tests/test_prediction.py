"""Predicted outputs: the answer is that of plain decoding, and edits of the text cost a few passes each."""

from __future__ import annotations

import random
from typing import Any

import pytest

from outpace.api.model import Model
from outpace.api.stream import Completion
from outpace.core.lm import LM
from outpace.errors import UsageError
from outpace.methods.prediction import Alignment, PredictedOutput
from outpace.testing import ToyLM
from tests.tiny_tokenizers import characters, reciting

TEXT = "".join(f"def f{i}(x, y):\n    return x * {i} + y\n\n" for i in range(12))


def told(answer: str, prediction: str, **settings: Any) -> Completion:
    """What comes of a model that knows the answer by heart."""
    model = reciting(characters(TEXT + answer), answer)
    given = {"method": "prediction", **settings, "max_tokens": len(answer)}
    found: Completion = model.generate([0], prediction=prediction, **given)
    assert found.text == answer
    return found


def passes(answer: str, prediction: str, **settings: Any) -> int:
    return told(answer, prediction, **settings).stats.passes


def test_a_right_prediction_is_taken_in_whole_drafts() -> None:
    assert passes(TEXT, TEXT, depth=16) <= len(TEXT) / 17 + 3


EDITS = {
    "replaced": TEXT.replace("f3(x", "g9(x"),
    "inserted": TEXT.replace("def f5", "# a new line\ndef f5"),
    "left out": TEXT.replace("def f4(x, y):\n    return x * 4 + y\n\n", ""),
    "at the front": "# in front\n" + TEXT,
    "at the end": TEXT + "# more\n",
    "moved": TEXT[200:] + TEXT[:200],
}


@pytest.mark.parametrize("policy", ["fixed", "auto"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_costs_as_many_passes_as_it_has_tokens_and_a_few(edit: str, policy: str) -> None:
    answer = EDITS[edit]
    new = {"inserted": 13, "at the front": 11, "at the end": 7}.get(edit, 3)
    found = told(answer, TEXT, policy=policy)
    assert found.stats.passes <= len(TEXT) / 17 + 3 + new + 12
    drafted, accepted = found.sources["prediction"]
    assert (drafted, accepted) == (found.stats.drafted, found.stats.accepted)


def test_chains_realign_too() -> None:
    assert passes(EDITS["inserted"], TEXT, width=1) <= passes(EDITS["inserted"], TEXT) + 6


def test_auto_drafts_from_a_prediction_and_counts_it_apart() -> None:
    found = told(EDITS["replaced"], TEXT, method="auto")
    assert found.stats.passes < len(TEXT) / 8
    assert found.sources["prediction"].accepted > 300
    assert sum(use.drafted for use in found.sources.values()) == found.stats.drafted


def test_another_text_costs_nothing_but_tries(toy: Model) -> None:
    plain = toy.generate([1, 2, 3], method="plain", max_tokens=40)
    found = toy.generate([1, 2, 3], method="prediction", prediction=[63] * 500, max_tokens=40)
    assert found.tokens == plain.tokens and found.stats.drafted < 60


def test_the_place_is_found_in_a_long_text_of_equal_lines() -> None:
    lines = [7, 8, 9] * 4000
    follow = Alignment([*lines, 1, 2, 3, 4, 5], 0)
    follow.follow([60, 61, 1, 2, 3], 0)
    assert follow.place == len(lines) + 3


def test_random_edits_of_a_random_text_are_followed_exactly(toy_draft: LM) -> None:
    """Whatever the prediction is, the tokens are those of plain decoding, and the place is one in the prediction."""
    chance = random.Random(0)
    model = Model(ToyLM())
    plain = model.generate([4, 2], method="plain", max_tokens=60, temperature=1.0, seed=3).tokens
    for _ in range(30):
        said = [token for token in plain if chance.random() > 0.1]
        for _ in range(3):
            said.insert(chance.randrange(len(said)), chance.randrange(64))
        given = {"prediction": said, "max_tokens": 60, "temperature": 1.0, "seed": 3}
        assert model.generate([4, 2], method="prediction", width=chance.choice([1, 2]), **given).tokens == plain
        follow = Alignment(said, 0)
        follow.follow(plain, 0)
        assert 0 <= follow.place <= len(said)


def test_a_prediction_as_text_needs_a_tokenizer(toy: Model) -> None:
    with pytest.raises(UsageError, match="needs a tokenizer"):
        toy.generate([1], prediction="text")
    with pytest.raises(UsageError, match="width >= 1"):
        PredictedOutput(width=0)
