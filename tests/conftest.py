"""What several test files share: a toy target with a draft that half agrees with it, and a real model."""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():  # Triton reads it when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import outpace
from outpace import registry
from outpace.api.model import Model
from outpace.core.lm import LM
from outpace.models.gguf.runtime import File
from outpace.policies.controller.costs import Costs
from outpace.testing import ToyLM
from tests.interpreter import hasten

if os.environ.get("TRITON_INTERPRET") == "1":
    hasten()
gc.collect()
gc.freeze()  # what was imported is not looked through in every collection
for package in ("torchao", "torch.utils._pytree"):  # Transformers imports torchao, which tells of missing GPUs
    logging.getLogger(package).setLevel(logging.ERROR)
SMOLLM2 = "smollm2-135m-instruct"
Maker = Callable[..., dict[str, Any]]


LOSSLESS = [name for name in registry.methods() if registry.lossless_options(name) is not None]


def settings_of(name: str, draft: LM) -> dict[str, Any]:
    """The method by name, with a draft if it takes one, and lossless: nothing here knows a particular method."""
    known = registry.options(registry.find(name))
    needed: dict[str, Any] = {"draft": draft} if "draft" in known else {}
    needed |= {"head": "random"} if "head" in known else {}
    return {"method": name, **needed, **(registry.lossless_options(name) or {})}


@pytest.fixture(scope="session", autouse=True)
def costs() -> Iterator[Costs]:
    """What passes are said to cost: tests do not depend on the clock, and leave nothing in the cache folder."""
    made_up = Costs(((1, 1.0), (8, 1.3), (64, 4.0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outpace.policies.controller.costs.load_or_measure", lambda lm, name="": made_up)
        patch.setattr("outpace.models.gguf.repack.load_faster", File)  # as the file has it
        yield made_up


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
    return smollm2.lm.layers.slice([i for i in range(30) if i not in (9, 12, 15, 18)])  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def smollm2_gguf() -> Model:
    pytest.importorskip("cyllama")
    return outpace.load(f"{SMOLLM2}.gguf")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for the pages of a module."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium on this machine")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or extensions report as leaked what is still there at the end
