"""What several test files share: a toy target with a draft that half agrees with it, and a real model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import outpace
from outpace import registry
from outpace.api import Model
from outpace.models.base import LM
from outpace.testing import ToyLM

SMOLLM2 = "smollm2-135m-instruct"
Maker = Callable[..., dict[str, Any]]


def settings_of(name: str, draft: LM) -> dict[str, Any]:
    """The method by name, with a draft if it takes one: nothing here knows a particular method."""
    needed = {"draft": draft} if "draft" in registry.options(registry.find(name)) else {}
    return {"method": name, **needed}


@pytest.fixture(scope="session")
def toy() -> Model:
    return Model(ToyLM(layers=2))


@pytest.fixture(scope="session")
def toy_draft() -> LM:
    return ToyLM(layers=1)


@pytest.fixture(scope="session")
def smollm2() -> Model:
    return outpace.load(SMOLLM2, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def smollm2_draft(smollm2: Model) -> LM:
    """The same model without four of its layers: often right, often wrong."""
    return smollm2.lm.slice([i for i in range(30) if i not in (9, 12, 15, 18)])  # type: ignore[attr-defined]
