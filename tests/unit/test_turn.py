"""The number of lanes that use the database at the same time is limited. No lane waits
for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from django_txmsg.relaying import limits
from django_txmsg.relaying.limits import Turn

#: Seconds after which one who has not come in is taken to wait.
A_WHILE = 0.2


@contextmanager
def another(
    turn: Turn, leave: threading.Event | None = None
) -> Iterator[threading.Event]:
    """Run another lane in a thread. Yields an event that the lane sets as soon as it
    uses the database. With `leave`, the lane uses the database until the test sets
    `leave`."""
    came = threading.Event()

    def work() -> None:
        with turn.at_database():
            came.set()
            if leave:
                leave.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield came
    finally:
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LONGEST", 20.0)


@pytest.mark.usefixtures("patient")
def test_one_lane_waits_for_another_while_the_broker_is_busy() -> None:
    turn = Turn()
    with ExitStack() as here, turn.at_broker():
        here.enter_context(turn.at_database())
        with another(turn) as came:
            assert not came.wait(A_WHILE)
            here.close()
            assert came.wait(5)


@pytest.mark.usefixtures("patient")
def test_a_second_place_admits_a_second_lane() -> None:
    turn = Turn(2)
    with turn.at_broker(), turn.at_database(), another(turn) as came:
        assert came.wait(5)


@pytest.mark.usefixtures("patient")
def test_two_lanes_use_the_database_while_the_broker_is_idle() -> None:
    turn = Turn()
    with ExitStack() as first, turn.at_database():
        with another(turn) as second:
            assert second.wait(5)
        first.enter_context(turn.at_database())
        with another(turn) as third:
            assert not third.wait(A_WHILE)
            first.close()
            assert third.wait(5)


@pytest.mark.usefixtures("patient")
def test_waiting_lanes_go_on_when_the_broker_becomes_idle() -> None:
    turn = Turn(2)
    with turn.at_database(), turn.at_database(), ExitStack() as broker:
        broker.enter_context(turn.at_broker())
        leave = threading.Event()
        with another(turn, leave) as third, another(turn, leave) as fourth:
            assert not third.wait(A_WHILE)
            assert not fourth.is_set()
            broker.close()
            assert third.wait(5)
            assert fourth.wait(5)
            leave.set()


def test_lane_goes_on_when_a_turn_is_never_returned() -> None:
    turn = Turn()
    with turn.at_broker(), turn.at_database(), another(turn) as came:
        assert came.wait(5)


@pytest.mark.usefixtures("patient")
def test_an_error_gives_the_turn_back() -> None:
    turn = Turn()
    with turn.at_broker():
        with pytest.raises(ValueError, match="deadlock"), turn.at_database():
            raise ValueError("deadlock")
        with another(turn) as came:
            assert came.wait(5)
