"""Losses: how far the distribution of a draft is from that of its target, as what the target would accept, or as nats.

With the target's distribution p and the draft's q, a guess that is drawn from q is accepted with probability

    alpha = sum_v min(p(v), q(v))          the overlap; 1 - alpha is the total variation

All losses come from one pass over the logits in tiles of some places each. No softmax outlives its tile: backward
computes it again from the logits, which exist anyway, and two numbers of each place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from outpace.heads.torch_compile import compile_function

TILE = 1 << 24  # logits that are looked at together: 64 MB for each thing that is computed of them
WIDE = 8  # so many times as many on a GPU: small pieces would keep it waiting
DECAY = 0.8  # weight of a step, relative to the one before it
DOUBT = 3.0  # how fast "mixed" goes over from KL to TV as the overlap grows


class StepLogits(NamedTuple):
    """Logits of one step of all chains: place i of every step belongs to the same chain."""

    draft: Tensor  # [places, vocab], with gradient
    target: Tensor  # [places, vocab], or [rows, vocab] with `at`; at the temperature that is trained for
    counts: Tensor | None = None  # [places], bool: places that count at this step; None: all
    at: Tensor | None = None  # [places]: row of `target` that belongs to a place, so that steps can share one tensor


class LossResult(NamedTuple):
    """What a loss says of a batch."""

    loss: Tensor  # []
    acceptance: Tensor  # [steps], detached: mean overlap of the places that count; nan where none does


Loss: TypeAlias = Callable[[Seq[StepLogits]], LossResult]
_quick = cache(compile_function)


class DistributionPair(NamedTuple):
    """A draft's distribution beside its target's; zeros where a place does not count."""

    log_alpha: Tensor  # [places]: log of the overlap
    cross: Tensor  # [places]: cross-entropy, in nats
    entropy: Tensor  # [places]: of the target, without gradient

    @property
    def alpha(self) -> Tensor:
        return self.log_alpha.exp()


class _Compare(torch.autograd.Function):
    """Overlap and cross-entropy with their gradients for the draft's logits z.

    With S = sum of q over {q <= p}: d alpha / d z_j = q_j ([q_j <= p_j] - S), and d cross / d z_j = q_j - p_j.
    The overlap is handled as its logarithm, whose gradient stays of order one however small it is.
    """

    @staticmethod
    def forward(ctx: Any, draft: Tensor, target: Tensor, counted: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(torch.promote_types(draft.dtype, target.dtype), torch.float32)
        found = draft.new_zeros((6, len(draft)), dtype=dtype)
        for places in _tiles(counted, draft.shape[1]):
            found[:, places] = _quick(_measured, draft.device)(draft, target, places, at[places], dtype)
        log_alpha, cross, entropy = found[2:5]
        ctx.save_for_backward(draft, target, counted, at, found)
        ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return log_alpha, cross, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_alpha: Tensor | None, d_cross: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        draft, target, counted, at, found = ctx.saved_tensors
        grad = torch.zeros_like(draft)  # [places, vocab]
        for places in _tiles(counted, draft.shape[1]):
            slopes = [None if slope is None else slope[places] for slope in (d_alpha, d_cross)]
            grad[places] = _quick(_gradient, draft.device)(draft, target, places, at[places], found[:, places], slopes)
        return grad, None, None, None


def _measured(draft: Tensor, target: Tensor, places: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
    """Of a tile: log of the sum of exp, draft's and target's; log of the overlap, cross-entropy, entropy, S / alpha."""
    lowest = torch.finfo(dtype).min
    q, p = draft[places].to(dtype), target[at].to(dtype)  # [tile, vocab]
    norms = q.logsumexp(-1), p.logsumexp(-1)
    q, p = q - norms[0][:, None], p - norms[1][:, None]
    # Distributions that share no token at all have no gradient; -inf would make it nan.
    log_alpha = torch.minimum(q, p).logsumexp(-1).clamp(min=lowest)
    share, likely = _within(q, p, log_alpha).sum(-1), p.exp()
    entropy, cross = -(p.clamp(min=lowest) * likely).sum(-1), -(q.clamp(min=lowest) * likely).sum(-1)
    return torch.stack([*norms, log_alpha, cross, entropy, share])  # [6, tile]


def _gradient(
    draft: Tensor, target: Tensor, places: Tensor, at: Tensor, found: Tensor, slopes: list[Tensor | None]
) -> Tensor:  # [tile, vocab]
    """What a tile's overlaps and cross-entropies, with these slopes, say of the draft's logits."""
    d_alpha, d_cross = slopes
    q = draft[places].to(found.dtype) - found[0][:, None]  # [tile, vocab]
    p = target[at].to(found.dtype) - found[1][:, None]
    gradient = torch.zeros_like(q)
    if d_alpha is not None:
        gradient = (_within(q, p, found[2]) - q.exp() * found[5][:, None]) * d_alpha[:, None]
    if d_cross is not None:
        gradient = gradient + (q.exp() - p.exp()) * d_cross[:, None]
    return gradient.to(draft.dtype)


def _tiles(places: Tensor, vocab: int) -> Iterator[Tensor]:
    yield from places.split(max(1, TILE * (WIDE if places.is_cuda else 1) // vocab))


def _within(q: Tensor, p: Tensor, log_alpha: Tensor) -> Tensor:
    """q / alpha where q <= p, zero elsewhere: never more than 1."""  # [tile, vocab] of logarithms
    return torch.where(q <= p, q - log_alpha[:, None], -torch.inf).exp()


def compare(distributions: StepLogits) -> DistributionPair:
    """Overlap and cross-entropy at every place."""
    draft, target = distributions.draft, distributions.target.detach()
    if draft.shape[1] != target.shape[1]:
        raise ValueError(
            f"distributions over {draft.shape[1]} and {target.shape[1]} tokens: restrict the target's to head.ids"
        )
    every = torch.arange(len(draft), device=draft.device)
    counted = every if distributions.counts is None else distributions.counts.nonzero().flatten()
    return DistributionPair(
        *_Compare.apply(draft, target, counted, every if distributions.at is None else distributions.at)
    )


def alpha(draft: Tensor, target: Tensor) -> Tensor:
    """The overlap of two distributions given by logits, with a gradient for the first."""
    # [places, vocab] x 2 -> [places]
    return compare(StepLogits(draft, target)).alpha


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    """Over the places that count; zero, but with a gradient, if there are none."""  # [places] x 2 -> []
    return (values * counts).sum() / counts.sum().clamp(min=1)


def _counts(distributions: StepLogits) -> Tensor:
    return (
        distributions.counts
        if distributions.counts is not None
        else distributions.draft.new_ones(len(distributions.draft), dtype=torch.bool)
    )


def _acceptance(found: Seq[DistributionPair], counts: Seq[Tensor]) -> Tensor:
    means = [(step.alpha * places).sum() / places.sum() for step, places in zip(found, counts, strict=True)]
    return torch.stack(means).detach()


def _stepwise(of: Callable[[DistributionPair], Tensor]) -> Loss:
    """A loss of single places: their mean at each step, and of the steps a mean with weights that decay."""

    def loss(steps: Seq[StepLogits]) -> LossResult:
        found, counts = (
            [compare(distributions) for distributions in steps],
            [_counts(distributions) for distributions in steps],
        )
        weights = [DECAY**i for i in range(len(steps))]
        means = [_mean(of(step), places) for step, places in zip(found, counts, strict=True)]
        total = torch.stack([w * mean for w, mean in zip(weights, means, strict=True)]).sum() / sum(weights)
        return LossResult(total, _acceptance(found, counts))

    return loss


def _mixed(found: DistributionPair) -> Tensor:
    """KL, which always has a gradient, where the distributions hardly overlap, and more and more TV where they do."""
    kl = torch.exp(-DOUBT * found.alpha.detach())
    return kl * (found.cross - found.entropy) + (1 - kl) * (1 - found.alpha)


def _end_to_end(steps: Seq[StepLogits]) -> LossResult:
    """1 - the share of guesses that are accepted in a row: Bebop's 1 - (1/g) sum_j prod_{i<=j} alpha_i.

    A chain ends at its first step that does not count; only steps before it are expected of it.
    """
    found, counts = (
        [compare(distributions) for distributions in steps],
        [_counts(distributions) for distributions in steps],
    )
    alive = torch.stack(counts).cumprod(0).bool()  # [steps, places]
    reached = torch.stack([step.log_alpha for step in found]).cumsum(0).exp()  # [steps, places]
    return LossResult(_mean(1 - reached, alive), _acceptance(found, counts))


LOSSES: dict[str, Loss] = {
    "ce": _stepwise(lambda found: found.cross),
    "kl": _stepwise(lambda found: found.cross - found.entropy),
    "tv": _stepwise(lambda found: 1 - found.alpha),
    "nla": _stepwise(lambda found: -found.log_alpha),
    "mixed": _stepwise(_mixed),
    "e2e": _end_to_end,
}
