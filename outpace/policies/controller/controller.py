"""The policy "auto": verify the draft tokens that are worth their price on this machine, or none of them.

Each draft token has a probability of acceptance, learned from how earlier drafts matched the text (`acceptance`). Each
pass has a price by its size (`costs`, `timing`). The controller verifies the likeliest tokens of all requests in the
batch, as many as maximize tokens per second (`selection`). Drafts that are not verified are still compared with the
text, so it keeps learning while drafting is off, for the cost of a lookup. Only a draft model has to run to be judged;
while it does not pay, it runs rarely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from outpace.core.layout import Layout
from outpace.core.policy import PassReport, Policy
from outpace.core.sequence import Sequence, Step
from outpace.core.tree import OFF, ROOT, Budget, Signal, Tree
from outpace.errors import UsageError
from outpace.policies.controller.acceptance import LEVELS, AcceptanceModel, Proposal, RequestHistory, kind
from outpace.policies.controller.backoff import Backoff, RequestPause
from outpace.policies.controller.costs import Costs
from outpace.policies.controller.selection import PAUSED, PassOffer, RequestPlan, likeliest
from outpace.policies.controller.timing import PassTimer, Timing

POOL = 128  # maximum number of draft tokens over all requests of a pass
LEAST_NODES = 8  # lower limit of that number for one request
SHADOWS = 4  # proposals kept per request until the text has judged them
IDLE = 0.005  # share of pass time that drafting may cost while no draft token is worth verifying
PROBING = 0.01  # share of total time that trying a draft model may cost while it does not pay
FIRST_WAIT = 16  # tokens until a draft model that did not pay is tried again; doubled each time
PROBE = 2  # levels that a trial drafts
ASSUMED_LEVEL_COST = 0.2  # cost of a draft model level in target passes, until it is measured
FOLLOW, FOLLOW_ALL = 0.15, 0.02  # weight of the newest pass in the averages of one request and of all


@dataclass
class RequestState(RequestHistory):
    """The state that the controller keeps for one request."""

    pause: RequestPause = field(default_factory=RequestPause)
    worth: float | None = None  # seconds that drafting saves per pass, on average
    alone: float = 1.0  # speed-up without the draft model, on average
    wait: int = FIRST_WAIT  # tokens between two trials of the draft model
    called_at: int | None = None  # length of the text when the draft model was last called
    probing: bool = False  # the draft model is tried in this pass
    drafted: bool = False  # the draft model has read the prompt
    unpaid: bool = False  # the draft model was not worth calling in this pass
    reach: float = 1.0  # probability that all tokens the draft model has drafted in this pass are accepted
    tokens: float = 1.0  # expected number of tokens that this pass commits with that draft


@dataclass
class Controller(Policy):
    """Verify as many of the batch's likeliest draft tokens as maximize tokens per second at measured cost, or none."""

    costs: Costs | None = None  # of the target, set by `Model`; None: use the drafter's own budget
    margin: float = 0.01  # ignore expected speed-ups below this share
    _acceptance: AcceptanceModel = field(default_factory=AcceptanceModel, init=False, repr=False)
    _measured: Timing | None = field(default=None, init=False, repr=False)
    _worth: float | None = field(default=None, init=False, repr=False)  # average of `worth` over all requests
    _batch_size: int = field(default=1, init=False, repr=False)  # of the current pass
    _backoff: Backoff = field(default_factory=Backoff, init=False, repr=False)
    _bare: bool = field(default=False, init=False, repr=False)  # the last pass had no draft tokens
    _probed: float = field(default=0.0, init=False, repr=False)  # seconds of all trials of draft models
    # The draft model drafts all levels without calling `keep_drafting`.
    _unseen: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.margin < 1:
            raise UsageError(f"margin={self.margin} is out of range")

    @property
    def _timing(self) -> Timing:
        if self._measured is None:
            assert self.costs is not None, "decisions need costs"
            self._measured = Timing(self.costs)
        return self._measured

    @property
    def watches_draft(self) -> bool:
        """Always False: a draft model may draft all levels in one go, and then its depth is chosen in advance."""
        return False

    # Before drafting

    def budgets(self, seqs: Seq[Sequence], batch_size: int) -> list[Budget]:
        if self.costs is not None:
            self._batch_size = batch_size
            self._backoff.choose_sample(
                [seq.state(self, RequestState).pause for seq in seqs if seq.drafter.model_source is None]
            )
        return super().budgets(seqs, batch_size)

    def budget(self, seq: Sequence) -> Budget:
        if self.costs is None:
            return super().budget(seq)
        state, source = seq.state(self, RequestState), seq.drafter.model_source
        paused = self._backoff.is_paused(state.pause)
        if paused and source is None:
            state.pause.left -= 1
            return OFF
        base = super().budget(seq)
        if not base.depth:
            return base
        nodes = max(LEAST_NODES, POOL // self._batch_size)
        if source is not None:
            depth = max(base.depth, LEVELS) if self.depth is None else base.depth
            levels = self._levels(seq, state, source, depth)
            if levels:
                nodes = max(min(base.nodes, nodes), depth) if self.nodes is None else base.nodes
                return Budget(depth, nodes, base.width, levels)
        if paused:
            state.pause.left -= 1
            return OFF
        return Budget(base.depth, min(base.nodes, nodes), base.width, None if source is None else 0)

    def idle(self, seq: Sequence) -> bool:
        if self.costs is None:
            return super().idle(seq)
        state = seq.state(self, RequestState)
        off = seq.drafter.model_source is None
        if state.unpaid and state.called_at is not None:
            off = len(seq.tokens) + 1 - state.called_at < state.wait
        return off and self._backoff.is_paused(state.pause)

    def _levels(self, seq: Sequence, state: RequestState, source: str, most: int) -> int:
        """Return the levels to draft with the draft model: all if it pays, few if a trial is due, otherwise 0."""
        price, batch_size = self._timing.pass_cost(self._batch_size, len(seq.tokens)), self._batch_size
        plain, level = price(0), self._level(price)
        reach, tokens, best, deepest = 1.0, 1.0, 0.0, 0
        for depth in range(1, most + 1):
            reach *= state.level(self._acceptance, source, depth)
            tokens += reach
            speedup = tokens * plain / (price(batch_size * depth) + depth * level + self._call_time)
            best, deepest = max((best, deepest), (speedup, depth))
        state.reach, state.tokens, state.probing, state.unpaid = 1.0, 1.0, False, False
        if best > max(1.0, state.alone) * (1 + self.margin):
            state.wait, state.called_at = FIRST_WAIT, len(seq.tokens)
            return deepest if self._unseen else most
        if state.called_at is None:
            state.called_at = len(seq.tokens)
        cost = (
            (PROBE + 1) * level + price(batch_size * PROBE) - plain
        )  # one level more to read the tokens it has missed
        waited = len(seq.tokens) - state.called_at >= state.wait
        if not waited or self._probed + cost > PROBING * self._timing.elapsed:
            state.unpaid = True
            return 0
        self._probed += cost
        state.wait, state.called_at, state.probing = 2 * state.wait, len(seq.tokens), True
        return min(PROBE, most)

    def keep_drafting(self, seq: Sequence, signal: Signal, depth: int) -> bool:
        """Continue while the next draft token adds more tokens per second than the draft so far."""
        source = seq.drafter.model_source
        if self.costs is None or source is None:
            return True
        state, batch_size, self._unseen = seq.state(self, RequestState), self._batch_size, False
        seen = self._acceptance.prob(kind(source, signal.prob, depth))
        state.reach *= state.bias(source).prob(seen)
        state.tokens += state.reach
        price = self._timing.pass_cost(batch_size, len(seq.tokens))
        now, then = (price(batch_size * d) + d * self._level(price) for d in (depth, depth + 1))
        gain = state.reach * state.level(self._acceptance, source, depth + 1)
        return state.probing or gain * (now + self._call_time) >= state.tokens * (then - now)

    @property
    def _call_time(self) -> float:
        # Seconds to call the drafters of all requests, without draft models.
        return self._batch_size * self._timing.call_time.get(0.0)

    def _level(self, price: Callable[[int], float]) -> float:
        return self._timing.level.get(ASSUMED_LEVEL_COST * price(0))

    # After drafting

    def select(self, seqs: Seq[Sequence], drafts: Seq[Any], budgets: Seq[Budget], batch_size: int) -> Seq[Layout]:
        if self.costs is None:
            return super().select(seqs, drafts, budgets, batch_size)
        timing, size, trees = self._timing, batch_size, drafts
        self._backoff.begin_pass()
        context = sum(len(seq.tokens) for seq in seqs) // len(seqs)
        found, whole = list(trees), len(seqs) == size  # otherwise the pass includes requests of other policies
        plans: dict[int, RequestPlan] = {}
        for i, (tree, budget) in enumerate(zip(trees, budgets, strict=True)):
            if budget.depth and budget.nodes:
                plans[i] = self._plan(seqs[i], tree, budget)
            else:
                tree.decision = PAUSED
        if not plans:
            timing.start(PassTimer(0, 0, size * whole, self._bare and _overlaps(seqs[0])), size, context)
            self._bare = True
            return found
        drafting, levels = list(plans.values()), max(plan.levels for plan in plans.values())
        price = timing.pass_cost(size, context)
        exposed = timing.exposed(price(0), size) if _overlaps(seqs[0]) else 0.0
        # Requests of a batch end at different times, so what some of them gain shortens the whole run by less.
        offer = PassOffer(size, price, self.margin * min(size, 4), exposed)
        speedup = self._decide(offer, drafting, len(drafting) * timing.call_time.get(0.0), levels)
        tokens = len(seqs) + sum(len(plan.kept) - 1 for plan in drafting)
        known = not any(plan.fresh for plan in drafting)
        timing.start(PassTimer(len(drafting) * known, levels * known, tokens * known * whole), size, context)
        for i, plan in plans.items():
            found[i] = plan.verified(speedup)
        self._bare = tokens == len(seqs)
        return found

    def _decide(self, offer: PassOffer, plans: list[RequestPlan], call_time: float, levels: int) -> float:
        """Choose the nodes to verify and update the pauses; return the expected speed-up."""
        order = likeliest(plans)
        forced = [plan.reach[node] for plan in plans for node in plan.kept if node != ROOT]
        choice = alone = offer.choose(order, call_time + levels * self._level(offer.seconds), forced)
        if levels:
            alone = offer.choose([c for c in order if plans[c.plan].alone[c.node]], call_time)
        for candidate in order[: choice.taken]:
            plans[candidate.plan].kept.append(candidate.node)
        self._settle(offer, plans, alone.speedup)
        return choice.speedup

    def _plan(self, seq: Sequence, tree: Tree, budget: Budget) -> RequestPlan:
        """Estimate the acceptance of every node, and remember the whole tree to compare it with the coming text."""
        state, source = seq.state(self, RequestState), seq.drafter.model_source
        # Sampled tokens may not be dropped because of their value, or the distribution would change.
        tree = tree.trim(budget) if tree.proposals else tree
        plan, proposal = RequestPlan(seq, tree, budget, probing=state.probing), Proposal(tree, [("", 0, 0)], [1.0])
        depths, reach, known = plan.depths, plan.reach, self._acceptance.prob
        for node in range(1, len(tree)):
            parent, who = tree.parents[node], tree.sources.get(node, "")
            depths.append(depths[parent] + 1)
            own = kind(who, _own_prob(tree, node), depths[node])
            prob = known(own)
            proposal.kinds.append(own)
            proposal.probs.append(prob)
            reach.append(reach[parent] * state.bias(who).prob(prob))
            plan.alone.append(plan.alone[parent] and who != source)
        if tree.proposals:
            plan.kept = list(range(len(tree)))
        if source is not None:
            plan.levels = max((plan.depths[node] for node in tree.signals), default=0)
            self._unseen = self._unseen or (plan.levels > 1 and state.tokens == 1.0)
        plan.fresh = seq.stats.passes == 0 or (plan.levels > 0 and not state.drafted)
        state.drafted = state.drafted or plan.levels > 0
        state.add(proposal, SHADOWS)
        return plan

    def _settle(self, offer: PassOffer, plans: list[RequestPlan], alone: float) -> None:
        """Update the pauses: the gain of this proposal decides when each request drafts again."""
        plain, exposed, call_time = offer.seconds(0), offer.exposed, self._timing.call_time.get(0.0)
        verified = sum(len(plan.kept) - 1 for plan in plans)
        extra = (offer.seconds(verified) - plain) / max(verified, 1)  # seconds per draft token
        gains = []
        for plan in plans:
            state = plan.seq.state(self, RequestState)
            saved = (plan.expected - 1) * (plain - exposed) / offer.batch_size - (len(plan.kept) - 1) * extra
            if state.worth is None:
                state.worth = self._worth if self._worth is not None else 2 * call_time
            state.worth += FOLLOW * (saved - state.worth)
            self._worth = state.worth if self._worth is None else self._worth + FOLLOW_ALL * (saved - self._worth)
            state.alone += FOLLOW * (alone - state.alone)
            gains.append(max(saved, state.worth) - call_time)
        pauses = [plan.seq.state(self, RequestState).pause for plan in plans]
        longest = int((offer.batch_size * call_time + exposed) / (IDLE * plain))
        self._backoff.update(pauses, gains, offer.batch_size, exposed, longest)

    def after_pass(self, report: PassReport) -> None:
        if self.costs is not None:
            self._timing.read(report)

    def observe(self, seq: Sequence, step: Step) -> None:
        if self.costs is not None:
            state = seq.state(self, RequestState)
            for token in step.tokens if state.proposals else ():
                state.judge(token, self._acceptance, seq.drafter.model_source)


def _overlaps(seq: Sequence) -> bool:
    return seq.target is not None and seq.target.asynchronous


def _own_prob(tree: Tree, node: int) -> float | None:
    """Return the drafter's own probability of a node, if it gave one."""
    prob = tree.probs.get(node)
    if prob is None and node in tree.signals:
        return tree.signals[node].prob
    return prob
