"""Training losses: how far the draft's distribution is from the target's, in terms of acceptance or in nats.

With the target's distribution p and the draft's q, a draft token sampled from q is accepted with probability

    alpha = sum_v min(p(v), q(v))          the overlap; 1 - alpha is the total variation

All losses come from one pass over the logits, in tiles of some positions each. No softmax outlives its tile: the
backward pass recomputes it from the logits, which exist anyway, and two numbers per position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from outpace.heads.torch_compile import compile_function

TILE = 1 << 24  # logits that are processed together: 64 MB for each intermediate tensor
WIDE = 8  # factor on a GPU, which small tiles would leave idle
DECAY = 0.8  # weight of a step, relative to the one before it
MIX_RATE = 3.0  # how fast "mixed" moves from KL to TV as the overlap grows


class StepLogits(NamedTuple):
    """Logits of one step of all chains: position i of every step belongs to the same chain."""

    draft: Tensor  # [positions, vocab], with gradient
    target: Tensor  # [positions, vocab], or [rows, vocab] with `at`; at the training temperature
    counts: Tensor | None = None  # [positions], bool: whether a position counts at this step; None: all do
    at: Tensor | None = None  # [positions]: the row of `target` for a position, so that steps can share one tensor


class LossResult(NamedTuple):
    """The loss of a batch, and the acceptance at each step."""

    loss: Tensor  # []
    acceptance: Tensor  # [steps], detached: mean overlap of the positions that count; nan where none does


Loss: TypeAlias = Callable[[Seq[StepLogits]], LossResult]
_quick = cache(compile_function)


class DistributionPair(NamedTuple):
    """The draft's distribution compared with the target's; zeros where a position does not count."""

    log_alpha: Tensor  # [positions]: log of the overlap
    cross: Tensor  # [positions]: cross-entropy, in nats
    entropy: Tensor  # [positions]: of the target, without gradient

    @property
    def alpha(self) -> Tensor:
        return self.log_alpha.exp()


class _Compare(torch.autograd.Function):
    """Overlap and cross-entropy, with their gradients for the draft's logits z.

    With S = sum of q over {q <= p}: d alpha / d z_j = q_j ([q_j <= p_j] - S), and d cross / d z_j = q_j - p_j.
    The overlap is kept as its logarithm, whose gradient stays of order one however small the overlap is.
    """

    @staticmethod
    def forward(ctx: Any, draft: Tensor, target: Tensor, counted: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(torch.promote_types(draft.dtype, target.dtype), torch.float32)
        found = draft.new_zeros((6, len(draft)), dtype=dtype)
        for tile in _tiles(counted, draft.shape[1]):
            found[:, tile] = _quick(_measured, draft.device)(draft, target, tile, at[tile], dtype)
        log_alpha, cross, entropy = found[2:5]
        ctx.save_for_backward(draft, target, counted, at, found)
        ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return log_alpha, cross, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_alpha: Tensor | None, d_cross: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        draft, target, counted, at, found = ctx.saved_tensors
        grad = torch.zeros_like(draft)  # [positions, vocab]
        for tile in _tiles(counted, draft.shape[1]):
            slopes = [None if slope is None else slope[tile] for slope in (d_alpha, d_cross)]
            grad[tile] = _quick(_gradient, draft.device)(draft, target, tile, at[tile], found[:, tile], slopes)
        return grad, None, None, None


def _measured(draft: Tensor, target: Tensor, tile: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute for a tile: log-sum-exp of draft and target, log overlap, cross-entropy, entropy, S / alpha."""
    lowest = torch.finfo(dtype).min
    q, p = draft[tile].to(dtype), target[at].to(dtype)  # [tile, vocab]
    norms = q.logsumexp(-1), p.logsumexp(-1)
    q, p = q - norms[0][:, None], p - norms[1][:, None]
    # Distributions that share no token at all have no gradient; -inf would make it nan.
    log_alpha = torch.minimum(q, p).logsumexp(-1).clamp(min=lowest)
    share, likely = _within(q, p, log_alpha).sum(-1), p.exp()
    entropy, cross = -(p.clamp(min=lowest) * likely).sum(-1), -(q.clamp(min=lowest) * likely).sum(-1)
    return torch.stack([*norms, log_alpha, cross, entropy, share])  # [6, tile]


def _gradient(
    draft: Tensor, target: Tensor, tile: Tensor, at: Tensor, found: Tensor, slopes: list[Tensor | None]
) -> Tensor:  # [tile, vocab]
    """Return the gradient of a tile's draft logits, given those of its overlaps and cross-entropies (`slopes`)."""
    d_alpha, d_cross = slopes
    q = draft[tile].to(found.dtype) - found[0][:, None]  # [tile, vocab]
    p = target[at].to(found.dtype) - found[1][:, None]
    gradient = torch.zeros_like(q)
    if d_alpha is not None:
        gradient = (_within(q, p, found[2]) - q.exp() * found[5][:, None]) * d_alpha[:, None]
    if d_cross is not None:
        gradient = gradient + (q.exp() - p.exp()) * d_cross[:, None]
    return gradient.to(draft.dtype)


def _tiles(positions: Tensor, vocab: int) -> Iterator[Tensor]:
    yield from positions.split(max(1, TILE * (WIDE if positions.is_cuda else 1) // vocab))


def _within(q: Tensor, p: Tensor, log_alpha: Tensor) -> Tensor:
    """Return q / alpha where q <= p, and zero elsewhere; never more than 1."""  # [tile, vocab] of logarithms
    return torch.where(q <= p, q - log_alpha[:, None], -torch.inf).exp()


def compare(distributions: StepLogits) -> DistributionPair:
    """Compute overlap and cross-entropy at every position."""
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
    """Return the overlap of two distributions given by logits, with a gradient for the first."""
    # [positions, vocab] x 2 -> [positions]
    return compare(StepLogits(draft, target)).alpha


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    """Return the mean over positions that count; zero, but with a gradient, if none does."""  # [positions] x 2 -> []
    return (values * counts).sum() / counts.sum().clamp(min=1)


def _counts(distributions: StepLogits) -> Tensor:
    return (
        distributions.counts
        if distributions.counts is not None
        else distributions.draft.new_ones(len(distributions.draft), dtype=torch.bool)
    )


def _acceptance(found: Seq[DistributionPair], counts: Seq[Tensor]) -> Tensor:
    means = [(step.alpha * counted).sum() / counted.sum() for step, counted in zip(found, counts, strict=True)]
    return torch.stack(means).detach()


def _stepwise(of: Callable[[DistributionPair], Tensor]) -> Loss:
    """Build a loss from a value per position: the mean at each step, then a mean over steps with decaying weights."""

    def loss(steps: Seq[StepLogits]) -> LossResult:
        found, counts = (
            [compare(distributions) for distributions in steps],
            [_counts(distributions) for distributions in steps],
        )
        weights = [DECAY**i for i in range(len(steps))]
        means = [_mean(of(step), counted) for step, counted in zip(found, counts, strict=True)]
        total = torch.stack([w * mean for w, mean in zip(weights, means, strict=True)]).sum() / sum(weights)
        return LossResult(total, _acceptance(found, counts))

    return loss


def _mixed(found: DistributionPair) -> Tensor:
    """Use KL, which always has a gradient, where the distributions hardly overlap, and more of TV as they overlap."""
    kl = torch.exp(-MIX_RATE * found.alpha.detach())
    return kl * (found.cross - found.entropy) + (1 - kl) * (1 - found.alpha)


def _end_to_end(steps: Seq[StepLogits]) -> LossResult:
    """1 - the share of draft tokens that are accepted in a row: Bebop's 1 - (1/g) sum_j prod_{i<=j} alpha_i.

    A chain ends at its first step that does not count; only the steps before it enter the loss.
    """
    found, counts = (
        [compare(distributions) for distributions in steps],
        [_counts(distributions) for distributions in steps],
    )
    alive = torch.stack(counts).cumprod(0).bool()  # [steps, positions]
    reached = torch.stack([step.log_alpha for step in found]).cumsum(0).exp()  # [steps, positions]
    return LossResult(_mean(1 - reached, alive), _acceptance(found, counts))


LOSSES: dict[str, Loss] = {
    "ce": _stepwise(lambda found: found.cross),
    "kl": _stepwise(lambda found: found.cross - found.entropy),
    "tv": _stepwise(lambda found: 1 - found.alpha),
    "nla": _stepwise(lambda found: -found.log_alpha),
    "mixed": _stepwise(_mixed),
    "e2e": _end_to_end,
}
