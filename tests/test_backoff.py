"""Who is asked, and who rests: together, longer each time, some for all of a large batch; all wake when it pays."""

from __future__ import annotations

from itertools import pairwise

import pytest

from outpace.policies.controller.backoff import LONGEST, SAMPLE, Backoff, RequestPause

NOTHING, MUCH = -1.0, 10.0  # seconds that asking gains


def step(
    rota: Backoff, rests: list[RequestPause], gain: float, exposed: float = 1.0, longest: int = LONGEST
) -> list[int]:
    """One pass of a policy: who is asked in it."""
    rota.choose_sample(rests)
    asked = [i for i, rest in enumerate(rests) if not rota.is_paused(rest)]
    for i in set(range(len(rests))) - set(asked):
        rests[i].left -= 1
    rota.begin_pass()
    if asked:
        rota.update([rests[i] for i in asked], [gain] * len(asked), len(rests), exposed, longest)
    return asked


def asked_in(rota: Backoff, rests: list[RequestPause], passes: int, gain: float = NOTHING) -> dict[int, list[int]]:
    """Passes in which somebody was asked, and who."""
    found = {now: step(rota, rests, gain) for now in range(passes)}
    return {now: asked for now, asked in found.items() if asked}


def test_all_are_asked_while_it_pays() -> None:
    rota, rests = Backoff(), [RequestPause() for _ in range(64)]
    assert all(len(step(rota, rests, MUCH)) == 64 for _ in range(10))


@pytest.mark.parametrize("rows", [1, 3, SAMPLE])
def test_few_are_all_asked_each_time_and_rest_longer_each_time(rows: int) -> None:
    rota, rests = Backoff(), [RequestPause() for _ in range(rows)]
    found = asked_in(rota, rests, 600)
    assert all(len(asked) == rows for asked in found.values())
    apart = [after - before for before, after in pairwise(found)]
    assert all(after >= before for before, after in pairwise(apart[1:])) and apart[-1] == LONGEST


def test_of_many_some_are_asked_for_all_and_each_in_its_turn() -> None:
    rota, rests = Backoff(), [RequestPause() for _ in range(64)]
    found = asked_in(rota, rests, 3000)
    first, *others = found.values()
    assert len(first) == 64 and all(len(asked) == SAMPLE for asked in others)
    assert {i for asked in others[:8] for i in asked} == set(range(64))
    assert len(found) < 30 and max(after - before for before, after in pairwise(found)) == LONGEST


@pytest.mark.parametrize("longest", [0, 1, 2, 3])
def test_short_rests_of_many_are_kept_too(longest: int) -> None:
    rota, rests = Backoff(), [RequestPause() for _ in range(64)]
    found = [len(step(rota, rests, NOTHING, longest=longest)) for _ in range(40)]
    assert found == [64] * 40 if longest == 0 else set(found[1:]) == {0, SAMPLE}


def test_no_rest_is_longer_than_what_asking_is_worth() -> None:
    rota, rests = Backoff(), [RequestPause() for _ in range(64)]
    found = [now for now in range(100) if step(rota, rests, NOTHING, longest=10)]
    assert {after - before for before, after in pairwise(found[1:])} == {8}


def test_all_are_woken_when_those_who_were_asked_gain() -> None:
    rota, rests = Backoff(), [RequestPause() for _ in range(64)]
    step(rota, rests, NOTHING)
    while len(asked := step(rota, rests, MUCH)) == 0:
        pass
    assert len(asked) == SAMPLE
    assert len(step(rota, rests, MUCH)) == 64


def test_those_who_gain_nothing_rest_beside_those_who_do() -> None:
    rota, rests = Backoff(), [RequestPause(), RequestPause()]
    rota.begin_pass()
    rota.update(rests, [MUCH, NOTHING], SAMPLE, 1.0, LONGEST)
    assert not rota.is_paused(rests[0]) and rota.is_paused(rests[1])


@pytest.mark.parametrize(("each", "woken"), [(0.1, False), (0.2, True)])
def test_what_some_gain_counts_for_all_whom_they_stand_for(each: float, woken: bool) -> None:
    rota, rests = Backoff(), [RequestPause() for _ in range(64)]
    step(rota, rests, NOTHING)
    while not step(rota, rests, each, exposed=10.0):
        pass
    assert (len(step(rota, rests, each, exposed=10.0)) == 64) == woken


def test_who_joins_a_large_batch_that_rests_waits_for_the_others() -> None:
    rota, rests = Backoff(), [RequestPause() for _ in range(32)]
    step(rota, rests, NOTHING)
    rests.append(RequestPause())
    found = asked_in(rota, rests, 200)
    assert min(found) > 0 and all(len(asked) > 1 for asked in found.values())


def test_who_joins_a_few_is_asked_at_once() -> None:
    rota, rests = Backoff(), [RequestPause() for _ in range(SAMPLE - 1)]
    step(rota, rests, NOTHING)
    rests.append(RequestPause())
    assert step(rota, rests, NOTHING) == [SAMPLE - 1]
