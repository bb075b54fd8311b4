"""The policy "auto": verify the draft tokens that are worth their price on this machine, or none of them.

Each draft token has a probability of acceptance, learned from how the text went on (`acceptance`). Each pass has a
price by its size (`costs`, `timing`). The likeliest tokens of all requests in the batch are verified, as many as make
tokens per second highest (`selection`). Drafts that were not verified are still compared with the text, so the
controller keeps learning while drafting is off, for the cost of a lookup. Only a draft model has to run to be judged;
while it does not pay it runs rarely.
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
from outpace.policies.controller.selection import RESTING, PassOffer, RequestPlan, likeliest
from outpace.policies.controller.timing import PassTimer, Timing

POOL = 128  # guesses that all requests of a pass may propose together
LEAST_NODES = 8  # of one of them
SHADOWS = 4  # proposals of a request that wait for their judgement
IDLE = 0.005  # share of a pass that asking may cost while nothing is worth verifying
PROBING = 0.01  # share of all time that asking a draft model may cost while it does not pay
FIRST_WAIT = 16  # tokens until a draft model that did not pay is asked again; twice as many each time
PROBE = 2  # levels
GUESSED_LEVEL = 0.2  # passes of the target that a level of a draft costs, before it was measured
FOLLOW, FOLLOW_ALL = 0.15, 0.02  # weight of the newest pass in an average of a request, and of all


@dataclass
class RequestState(RequestHistory):
    """What is remembered of one request."""

    rest: RequestPause = field(default_factory=RequestPause)
    worth: float | None = None  # seconds that asking saves, on average
    alone: float = 1.0  # speed-up without the draft model, on average
    wait: int = FIRST_WAIT
    asked_at: int | None = None  # tokens there were when the draft model was last asked
    probing: bool = False
    drafted: bool = False  # the draft model has read the prompt
    unpaid: bool = False  # the draft model was not worth asking for this pass
    reach: float = 1.0  # probability that all that the draft model drafted for this pass is accepted
    tokens: float = 1.0  # that this pass is expected to commit by it


@dataclass
class Controller(Policy):
    """What pays by measured cost: the likeliest guesses of the whole batch, as many as make it fastest, or none."""

    costs: Costs | None = None  # of the target; a `Model` gives its own. Without them: the drafter's own budget
    margin: float = 0.01  # a speed-up that is too small to be believed
    _calibrator: AcceptanceModel = field(default_factory=AcceptanceModel, init=False, repr=False)
    _measured: Timing | None = field(default=None, init=False, repr=False)
    _worth: float | None = field(default=None, init=False, repr=False)  # the same, of all requests
    _batch_size: int = field(default=1, init=False, repr=False)  # requests in the pass
    _rota: Backoff = field(default_factory=Backoff, init=False, repr=False)
    _bare: bool = field(default=False, init=False, repr=False)  # there was no guess in the last pass
    _probed: float = field(default=0.0, init=False, repr=False)  # seconds
    _unseen: bool = field(
        default=False, init=False, repr=False
    )  # the draft model runs on without asking `keep_drafting`

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.margin < 1:
            raise UsageError(f"margin={self.margin} is out of range")

    @property
    def _meter(self) -> Timing:
        if self._measured is None:
            assert self.costs is not None, "decisions need costs"
            self._measured = Timing(self.costs)
        return self._measured

    @property
    def watches_draft(self) -> bool:
        """A draft that is faster by itself may be: then its depth is decided before."""
        return False

    # Before drafting

    def budgets(self, seqs: Seq[Sequence], batch_size: int) -> list[Budget]:
        if self.costs is not None:
            self._batch_size = batch_size
            self._rota.sample([seq.state(self, RequestState).rest for seq in seqs if seq.drafter.model_source is None])
        return super().budgets(seqs, batch_size)

    def budget(self, seq: Sequence) -> Budget:
        if self.costs is None:
            return super().budget(seq)
        state, source = seq.state(self, RequestState), seq.drafter.model_source
        resting = self._rota.resting(state.rest)
        if resting and source is None:
            state.rest.left -= 1
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
        if resting:
            state.rest.left -= 1
            return OFF
        return Budget(base.depth, min(base.nodes, nodes), base.width, None if source is None else 0)

    def idle(self, seq: Sequence) -> bool:
        if self.costs is None:
            return super().idle(seq)
        state = seq.state(self, RequestState)
        off = seq.drafter.model_source is None
        if state.unpaid and state.asked_at is not None:
            off = len(seq.tokens) + 1 - state.asked_at < state.wait
        return off and self._rota.resting(state.rest)

    def _levels(self, seq: Sequence, state: RequestState, source: str, most: int) -> int:
        """How deep to ask the draft model: as deep as it goes if it pays, a little if it is time to try again."""
        price, rows = self._meter.prices(self._batch_size, len(seq.tokens)), self._batch_size
        plain, level = price(0), self._level(price)
        reach, tokens, best, deepest = 1.0, 1.0, 0.0, 0
        for depth in range(1, most + 1):
            reach *= state.level(self._calibrator, source, depth)
            tokens += reach
            speedup = tokens * plain / (price(rows * depth) + depth * level + self._asking)
            best, deepest = max((best, deepest), (speedup, depth))
        state.reach, state.tokens, state.probing, state.unpaid = 1.0, 1.0, False, False
        if best > max(1.0, state.alone) * (1 + self.margin):
            state.wait, state.asked_at = FIRST_WAIT, len(seq.tokens)
            return deepest if self._unseen else most
        if state.asked_at is None:
            state.asked_at = len(seq.tokens)
        cost = (PROBE + 1) * level + price(rows * PROBE) - plain  # one more to read what it has missed
        waited = len(seq.tokens) - state.asked_at >= state.wait
        if not waited or self._probed + cost > PROBING * self._meter.elapsed:
            state.unpaid = True
            return 0
        self._probed += cost
        state.wait, state.asked_at, state.probing = 2 * state.wait, len(seq.tokens), True
        return min(PROBE, most)

    def keep_drafting(self, seq: Sequence, signal: Signal, depth: int) -> bool:
        """Draft on while the next token is worth more per second than what there is so far."""
        source = seq.drafter.model_source
        if self.costs is None or source is None:
            return True
        state, rows, self._unseen = seq.state(self, RequestState), self._batch_size, False
        seen = self._calibrator.prob(kind(source, signal.prob, depth))
        state.reach *= state.bias(source).prob(seen)
        state.tokens += state.reach
        price = self._meter.prices(rows, len(seq.tokens))
        now, then = (price(rows * d) + d * self._level(price) for d in (depth, depth + 1))
        gain = state.reach * state.level(self._calibrator, source, depth + 1)
        return state.probing or gain * (now + self._asking) >= state.tokens * (then - now)

    @property
    def _asking(self) -> float:
        return self._batch_size * self._meter.asking.get(0.0)

    def _level(self, price: Callable[[int], float]) -> float:
        return self._meter.level.get(GUESSED_LEVEL * price(0))

    # After drafting

    def select(self, seqs: Seq[Sequence], drafts: Seq[Any], budgets: Seq[Budget], batch_size: int) -> Seq[Layout]:
        if self.costs is None:
            return super().select(seqs, drafts, budgets, batch_size)
        meter, rows, trees = self._meter, batch_size, drafts
        self._rota.begin()
        context = sum(len(seq.tokens) for seq in seqs) // len(seqs)
        found, whole = list(trees), len(seqs) == rows  # else there is more in the pass than is planned here
        plans: dict[int, RequestPlan] = {}
        for i, (tree, budget) in enumerate(zip(trees, budgets, strict=True)):
            if budget.depth and budget.nodes:
                plans[i] = self._plan(seqs[i], tree, budget)
            else:
                tree.decision = RESTING
        if not plans:
            meter.start(PassTimer(0, 0, rows * whole, self._bare and _overlaps(seqs[0])), rows, context)
            self._bare = True
            return found
        asked, levels = list(plans.values()), max(plan.levels for plan in plans.values())
        # Rows of a batch end at different times, so what some of them gain shortens the whole by less.
        price = meter.prices(rows, context)
        exposed = meter.exposed(price(0), rows) if _overlaps(seqs[0]) else 0.0
        offer = PassOffer(rows, price, self.margin * min(rows, 4), exposed)
        speedup = self._decide(offer, asked, len(asked) * meter.asking.get(0.0), levels)
        tokens = len(seqs) + sum(len(plan.kept) - 1 for plan in asked)
        known = not any(plan.fresh for plan in asked)
        meter.start(PassTimer(len(asked) * known, levels * known, tokens * known * whole), rows, context)
        for i, plan in plans.items():
            found[i] = plan.verified(speedup)
        self._bare = tokens == len(seqs)
        return found

    def _decide(self, offer: PassOffer, plans: list[RequestPlan], asking: float, levels: int) -> float:
        """Choose what is kept, and what this says about asking again; gives the expected speed-up."""
        order = likeliest(plans)
        forced = [plan.reach[node] for plan in plans for node in plan.kept if node != ROOT]
        choice = alone = offer.choose(order, asking + levels * self._level(offer.seconds), forced)
        if levels:
            alone = offer.choose([g for g in order if plans[g.plan].alone[g.node]], asking)
        for guess in order[: choice.taken]:
            plans[guess.plan].kept.append(guess.node)
        self._settle(offer, plans, alone.speedup)
        return choice.speedup

    def _plan(self, seq: Sequence, tree: Tree, budget: Budget) -> RequestPlan:
        """Estimate every node, and remember the whole tree: the text will tell what was right."""
        state, source = seq.state(self, RequestState), seq.drafter.model_source
        # Tokens that were drawn may not be dropped for what they are, or the distribution would change.
        tree = tree.trim(budget) if tree.proposals else tree
        plan, proposal = RequestPlan(seq, tree, budget, probing=state.probing), Proposal(tree, [("", 0, 0)], [1.0])
        depths, reach, known = plan.depths, plan.reach, self._calibrator.prob
        for node in range(1, len(tree)):
            parent, who = tree.parents[node], tree.sources.get(node, "")
            depths.append(depths[parent] + 1)
            own = kind(who, _said(tree, node), depths[node])
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
        """What this proposal was worth decides when the drafter is asked again."""
        plain, exposed, asking = offer.seconds(0), offer.exposed, self._meter.asking.get(0.0)
        guesses = sum(len(plan.kept) - 1 for plan in plans)
        extra = (offer.seconds(guesses) - plain) / max(guesses, 1)  # seconds of a guess
        gains = []
        for plan in plans:
            state = plan.seq.state(self, RequestState)
            saved = (plan.expected - 1) * (plain - exposed) / offer.rows - (len(plan.kept) - 1) * extra
            if state.worth is None:
                state.worth = self._worth if self._worth is not None else 2 * asking
            state.worth += FOLLOW * (saved - state.worth)
            self._worth = state.worth if self._worth is None else self._worth + FOLLOW_ALL * (saved - self._worth)
            state.alone += FOLLOW * (alone - state.alone)
            gains.append(max(saved, state.worth) - asking)
        rests = [plan.seq.state(self, RequestState).rest for plan in plans]
        longest = int((offer.rows * asking + exposed) / (IDLE * plain))
        self._rota.settle(rests, gains, offer.rows, exposed, longest)

    def after_pass(self, report: PassReport) -> None:
        if self.costs is not None:
            self._meter.read(report)

    def observe(self, seq: Sequence, step: Step) -> None:
        if self.costs is not None:
            state = seq.state(self, RequestState)
            for token in step.tokens if state.proposals else ():
                state.judge(token, self._calibrator, seq.drafter.model_source)


def _overlaps(seq: Sequence) -> bool:
    return seq.target is not None and seq.target.asynchronous


def _said(tree: Tree, node: int) -> float | None:
    """What the drafter itself thinks of a node."""
    prob = tree.probs.get(node)
    if prob is None and node in tree.signals:
        return tree.signals[node].prob
    return prob
