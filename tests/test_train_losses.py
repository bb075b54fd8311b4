"""Losses against plain autograd in float64: values, gradients, memory, and that each brings a draft to its target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.train import losses
from outpace.train.losses import LOSSES, StepLogits, alpha, compare

SHAPES = [(1, 2), (3, 7), (5, 64), (17, 301)]


def logits(places: int, vocab: int, seed: int = 0, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draft, target = scale * torch.randn(2, places, vocab, generator=generator, dtype=torch.float64)
    return draft.requires_grad_(), target


def plain(draft: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Every quantity the way one writes it down, for autograd to differentiate."""
    q, p = draft.log_softmax(-1), target.log_softmax(-1)
    overlap = torch.minimum(q.exp(), p.exp()).sum(-1)
    cross, kl = -(p.exp() * q).sum(-1), (p.exp() * (p - q)).sum(-1)
    weight = torch.exp(-3 * overlap).detach()
    tv, mixed = 1 - overlap, weight * kl + (1 - weight) * (1 - overlap)
    return {"ce": cross, "kl": kl, "tv": tv, "nla": -overlap.log(), "mixed": mixed}


def chained(steps: list[StepLogits]) -> Tensor:
    """The end-to-end loss, chain by chain: what is expected to be accepted of what could be."""
    gained, possible = torch.zeros((), dtype=torch.float64), 0
    for place in range(len(steps[0].draft)):
        product = torch.ones((), dtype=torch.float64)
        for step in steps:
            if step.counts is not None and not step.counts[place]:
                break
            q, p = step.draft[place].softmax(-1), step.target[place].softmax(-1)
            product = product * torch.minimum(q, p).sum()
            gained, possible = gained + product, possible + 1
    return 1 - gained / possible


def expected(name: str, steps: list[StepLogits]) -> Tensor:
    if name == "e2e":
        return chained(steps)
    total = torch.zeros((), dtype=torch.float64)
    for i, step in enumerate(steps):
        values = plain(step.draft, step.target)[name]
        total = total + 0.8**i * (values if step.counts is None else values[step.counts]).mean()
    return total / sum(0.8**i for i in range(len(steps)))


def unrolled(count: int = 3, places: int = 11, vocab: int = 29, masked: bool = True) -> list[StepLogits]:
    steps = []
    for i in range(count):
        draft, target = logits(places, vocab, seed=i)
        counts = torch.rand(places, generator=torch.Generator().manual_seed(i)) < 0.7 if masked else None
        steps.append(StepLogits(draft, target, counts))
    return steps


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.fixture(params=[1, 100, 1 << 20])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(losses, "TILE", request.param)
    yield request.param


@pytest.mark.parametrize("shape", SHAPES)
def test_overlap_and_its_gradient_are_those_of_autograd(shape: tuple[int, int], tile: int) -> None:
    draft, target = logits(*shape)
    weights = torch.rand(shape[0], generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    wanted = torch.minimum(draft.softmax(-1), target.softmax(-1)).sum(-1)
    close(alpha(draft, target), wanted)
    grads = [torch.autograd.grad((weights * a).sum(), draft)[0] for a in (alpha(draft, target), wanted)]
    close(*grads)


def test_overlap_has_the_gradient_of_the_formula() -> None:
    draft, target = logits(4, 9)
    q, p = draft.softmax(-1).detach(), target.softmax(-1)
    least = (q <= p).double()
    (found,) = torch.autograd.grad(alpha(draft, target).sum(), draft)
    close(found, q * (least - (q * least).sum(-1, keepdim=True)))


def test_gradients_agree_with_finite_differences() -> None:
    draft, target = logits(3, 6)

    def every(z: Tensor) -> Tensor:
        found = compare(StepLogits(z, target))
        return torch.cat([found.alpha, found.log_alpha, found.cross])

    assert torch.autograd.gradcheck(every, draft, eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients_are_those_of_autograd(name: str, masked: bool, tile: int) -> None:
    steps = unrolled(masked=masked)
    drafts = [step.draft for step in steps]
    found, wanted = LOSSES[name](steps), expected(name, steps)
    close(found.loss, wanted)
    for mine, theirs in zip(torch.autograd.grad(found.loss, drafts), torch.autograd.grad(wanted, drafts), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("name", LOSSES)
def test_acceptance_is_the_mean_overlap_of_the_places_that_count(name: str) -> None:
    steps = unrolled()
    found = LOSSES[name](steps).acceptance
    for i, step in enumerate(steps):
        close(found[i], (1 - plain(step.draft, step.target)["tv"])[step.counts].mean().detach())
    assert not found.requires_grad


@pytest.mark.parametrize("name", LOSSES)
def test_steps_can_share_the_rows_of_one_target(name: str) -> None:
    _, target = logits(12, 29, seed=7)
    apart, shared = [], []
    for i in range(3):
        draft, _ = logits(9, 29, seed=i)
        at = torch.arange(9) + i
        apart.append(StepLogits(draft, target[at]))
        shared.append(StepLogits(draft, target, None, at))
    ours, theirs = LOSSES[name](shared), LOSSES[name](apart)
    close(ours.loss, theirs.loss)
    close(*(torch.autograd.grad(lost.loss, [s.draft for s in apart])[2] for lost in (ours, theirs)))


@pytest.mark.parametrize("name", LOSSES)
def test_places_that_do_not_count_have_no_say(name: str) -> None:
    steps = unrolled()
    spoiled = [
        StepLogits(s.draft.detach().masked_fill(~s.counts[:, None], torch.nan).requires_grad_(), s.target, s.counts)
        for s in steps
        if s.counts is not None
    ]
    lost = LOSSES[name](spoiled)
    close(lost.loss, LOSSES[name](steps).loss)
    lost.loss.backward()
    for step in spoiled:
        assert step.draft.grad is not None and step.counts is not None
        assert step.draft.grad[~step.counts].abs().sum() == 0 and step.draft.grad.isfinite().all()


def test_a_chain_ends_where_a_step_does_not_count() -> None:
    draft, target = logits(2, 5)
    counts = torch.tensor([[True, True], [False, True], [True, True]])
    steps = [StepLogits(draft, target, c) for c in counts]
    a = alpha(draft, target).detach()
    accepted = a[0] + a[1] + a[1] ** 2 + a[1] ** 3
    close(LOSSES["e2e"](steps).loss.detach(), 1 - accepted / 4)


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_without_places_costs_nothing_and_still_has_a_gradient(name: str) -> None:
    draft, target = logits(3, 5)
    lost = LOSSES[name]([StepLogits(draft, target, torch.zeros(3, dtype=torch.bool))])
    assert lost.loss == 0 and lost.acceptance.isnan().all()
    assert torch.autograd.grad(lost.loss, draft)[0].abs().sum() == 0


@pytest.mark.parametrize("name", LOSSES)
def test_distributions_far_apart_and_distributions_with_gaps_give_finite_gradients(name: str) -> None:
    apart = torch.tensor([[400.0, 0.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.0, 400.0]])
    filtered = torch.tensor([[1.0, 2.0, 0.0, -1.0]]), torch.tensor([[1.0, -torch.inf, 0.0, -torch.inf]])
    for given, target in (apart, filtered):
        draft = given.clone().requires_grad_()
        lost = LOSSES[name]([StepLogits(draft, target)])
        (grad,) = torch.autograd.grad(lost.loss, draft)
        assert lost.loss.isfinite() and grad.isfinite().all()


def test_negative_log_acceptance_pulls_where_the_overlap_underflows() -> None:
    draft = torch.tensor([[400.0, 0.0, 0.0]], requires_grad=True)
    target = torch.tensor([[0.0, 0.0, 400.0]])
    assert alpha(draft, target) == 0
    (grad,) = torch.autograd.grad(LOSSES["nla"]([StepLogits(draft, target)]).loss, draft)
    assert grad[0, 0] > 0.1 and grad[0, 2] < -0.1


def test_bfloat16_is_computed_in_float32() -> None:
    draft, target = (t.detach().bfloat16() for t in logits(6, 50))
    exact = alpha(draft.double(), target.double())
    found = alpha(draft.requires_grad_(), target)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)
    assert torch.autograd.grad(found.sum(), draft)[0].dtype == torch.bfloat16


def test_distributions_over_different_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match=r"head\.ids"):
        alpha(torch.zeros(2, 5), torch.zeros(2, 6))


class Sizes(TorchDispatchMode):
    """Elements of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for found in out if isinstance(out, tuple | list) else [out]:
            if isinstance(found, Tensor) and found.untyped_storage().data_ptr() not in given:
                self.made.append(found.numel())
        return out


@pytest.mark.parametrize("name", LOSSES)
def test_no_softmax_is_kept_and_none_is_larger_than_a_tile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    places, vocab = 40, 80
    monkeypatch.setattr(losses, "TILE", 4 * vocab)
    draft, target = logits(places, vocab)
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with Sizes() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = LOSSES[name]([StepLogits(draft, target)]).loss
    large = {t.data_ptr() for t in kept if t.numel() > 8 * places}  # six numbers of each place are kept
    assert large == {draft.data_ptr(), target.data_ptr()}
    assert max(forward.made) <= 4 * vocab
    with Sizes() as backward:
        loss.backward()
    assert sorted(backward.made)[-1] == places * vocab > sorted(backward.made)[-2] <= 4 * vocab


@pytest.mark.parametrize("name", LOSSES)
def test_descent_on_free_logits_reaches_the_target(name: str) -> None:
    steps = [logits(4, 12, seed=i) for i in range(3)]
    drafts = [draft for draft, _ in steps]
    assert LOSSES[name]([StepLogits(*step) for step in steps]).acceptance.max() < 0.6
    optimizer: Any = torch.optim.Adam(drafts, lr=0.2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.001, total_iters=300)
    for _ in range(300):
        optimizer.zero_grad()
        lost = LOSSES[name]([StepLogits(*step) for step in steps])
        lost.loss.backward()
        optimizer.step()
        schedule.step()
    assert LOSSES[name]([StepLogits(*step) for step in steps]).acceptance.min() > 0.995


def test_every_loss_is_least_at_the_target() -> None:
    _, target = logits(5, 20)
    nudge = logits(5, 20, seed=1, scale=0.1)[0].detach()
    for name, loss in LOSSES.items():
        best = loss([StepLogits(target.clone(), target)] * 2).loss
        assert best < loss([StepLogits(target + nudge, target)] * 2).loss
        assert name == "ce" or best.abs() < 1e-12
