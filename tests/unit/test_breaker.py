"""The beginning and the end of an outage, and the growing pauses between probes."""

from __future__ import annotations

import time

import pytest

from django_txmsg.errors import BrokerUnavailable, DispatchUnknown
from django_txmsg.runtime import breaker as breaker_module
from django_txmsg.runtime.breaker import Breaker
from tests.faults import wait_until


def test_a_server_that_works_for_a_moment_is_in_the_same_outage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    breaker = Breaker("orders", 600.0, first_pause=60.0)
    breaker.failed(OSError("first"))
    assert breaker.remaining <= 60.0 * 1.25

    breaker.worked()
    assert breaker.remaining == 0
    breaker.failed(OSError("second"))

    assert breaker.remaining > 60.0 * 1.25
    assert [
        one.getMessage() for one in caplog.records if one.levelname == "WARNING"
    ] == [
        "broker 'orders' cannot be used; its messages wait in the outbox and count no"
        " attempt: first",
        "broker 'orders' cannot be used after all; its messages wait in the outbox and"
        " count no attempt: second",
    ]


def test_lines_about_one_outage_are_at_least_a_second_apart(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breaker_module, "SAY_AGAIN", 100.0)
    breaker = Breaker("orders", 600.0, first_pause=30.0)
    for _ in range(4):  # with pauses of 30, 60, 120 and 240 seconds
        breaker.failed(OSError("no room"))
        breaker.worked()

    said = [one for one in caplog.records if one.levelname == "WARNING"]
    assert len(said) == 3


def test_a_server_that_worked_for_longer_than_the_last_pause_has_a_new_outage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    breaker = Breaker("orders", 600.0, first_pause=0.05)
    breaker.failed(OSError("first"))
    breaker.worked()
    ended = time.monotonic()
    wait_until(lambda: time.monotonic() - ended > 0.06)

    breaker.failed(OSError("second"))

    said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(said) == 2
    assert said[1].endswith("second")


def test_the_error_of_an_outage_can_be_stored() -> None:
    breaker = Breaker("orders", 600.0)
    breaker.failed(OSError("nul \x00 lone \ud800"))
    assert breaker.outage is not None
    assert breaker.outage.error == r"nul \x00 lone \ud800"


def test_a_session_that_only_waits_ends_no_outage_that_is_younger() -> None:
    breaker = Breaker("orders", 600.0, first_pause=60.0)
    opened = time.monotonic()
    wait_until(lambda: time.monotonic() > opened)
    breaker.failed(OSError("another session"))

    breaker.worked(opened=opened)
    assert breaker.remaining
    assert breaker.outage is not None

    reopened = time.monotonic()
    wait_until(lambda: time.monotonic() > reopened)
    breaker.worked(opened=time.monotonic())
    assert not breaker.remaining
    assert breaker.outage is None


@pytest.mark.parametrize("hung_up", [False, True])
def test_a_new_session_proves_nothing_about_messages_without_an_answer(
    hung_up: bool,
) -> None:
    """A broker with a memory alarm accepts sessions, but answers no message."""
    breaker = Breaker("orders", 600.0, first_pause=60.0)
    error = BrokerUnavailable("no receipt")
    error.__cause__ = DispatchUnknown("alarm", hung_up=hung_up)
    breaker.failed(error)
    failed = time.monotonic()
    wait_until(lambda: time.monotonic() > failed)

    breaker.worked(opened=time.monotonic())
    assert (breaker.outage is not None) is not hung_up

    breaker.worked()
    assert breaker.outage is None
    breaker.failed(OSError("refused"))
    failed = time.monotonic()
    wait_until(lambda: time.monotonic() > failed)
    breaker.worked(opened=time.monotonic())
    assert breaker.outage is None


def test_a_failure_that_no_session_meets_again_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    breaker = Breaker("orders", 0.01, first_pause=0.01)
    opened = time.monotonic()
    breaker.failed(OSError("the session of a stage that is paused now"))
    wait_until(lambda: not breaker.remaining)
    breaker.worked(opened=opened)
    assert breaker.outage is not None

    monkeypatch.setattr(breaker_module, "QUIET", 0.05)

    def forgotten() -> bool:
        breaker.worked(opened=opened)
        return breaker.outage is None

    wait_until(forgotten)
