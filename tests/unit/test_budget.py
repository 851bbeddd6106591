"""Lanes share a memory budget, and each large message is claimed in the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from django_txmsg.models import claiming
from django_txmsg.relaying.limits import Budget, Part


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claiming, "MAX_BYTES", 400)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def enter(budget: Budget, stack: ExitStack) -> Part:
    part = stack.enter_context(budget.part(threading.Event()))
    assert part is not None
    return part


def test_each_lane_has_its_share_and_the_first_may_take_a_larger_one(stack) -> None:
    budget = Budget(4)
    parts = [enter(budget, stack) for _ in range(4)]
    assert [one.max_bytes for one in parts] == [100] * 4
    assert [one.larger for one in parts] == [True, False, False, False]


def test_several_budgets_share_the_limit(stack) -> None:
    assert enter(Budget(2, budgets=4), stack).max_bytes == 50


def test_a_lane_waits_while_a_large_body_is_held(stack) -> None:
    budget, came = Budget(4), threading.Event()

    def work() -> None:
        with budget.part(threading.Event()):
            came.set()

    thread = threading.Thread(target=work)
    with ExitStack() as large:
        budget.claimed(enter(budget, large), 5000)
        thread.start()
        assert not came.wait(0.2)
    assert came.wait(10)
    thread.join(10)


def test_a_lane_that_waits_ends_when_it_is_stopped(stack) -> None:
    budget, stop = Budget(), threading.Event()
    budget.claimed(enter(budget, stack), 5000)
    found: list[Part | None] = []

    def work() -> None:
        with budget.part(stop) as part:
            found.append(part)

    thread = threading.Thread(target=work)
    thread.start()
    stop.set()
    thread.join(10)
    assert found == [None]


def test_the_last_lane_that_may_not_take_a_large_body_claims_again(stack) -> None:
    """Two lanes work at the same time, so neither may claim a large body. The lane that
    finishes last must claim again. It is then alone, and may claim the large body."""
    budget = Budget(4)
    with ExitStack() as first:
        enter(budget, first)
        second, third = ExitStack(), ExitStack()
        two = enter(budget, second)
    three = enter(budget, third)
    assert (two.larger, three.larger) == (False, False)
    for part in (two, three):
        budget.claimed(part, 0)
    second.close()
    assert not two.is_to_claim_again
    third.close()
    assert three.is_to_claim_again
    assert enter(budget, stack).larger


def test_a_lane_claims_again_if_another_lane_locked_a_large_row(stack) -> None:
    """Another lane has locked a large row without claiming it, so this lane did not see
    the row. This lane must claim again."""
    budget, first = Budget(4), ExitStack()
    one = enter(budget, first)
    with ExitStack() as second:
        budget.claimed(enter(budget, second), 0)
    budget.claimed(one, 0)
    first.close()
    assert one.larger
    assert one.is_to_claim_again
    with ExitStack() as again:
        budget.claimed(two := enter(budget, again), 0)
    assert not two.is_to_claim_again


def test_what_is_claimed_makes_room_for_others(stack) -> None:
    budget = Budget(1)
    budget.claimed(enter(budget, stack), 0)
    enter(budget, stack)
