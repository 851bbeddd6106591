"""What is kept of an exception: enough to read, little enough to store."""

from __future__ import annotations

from django_txmsg.failure import MAX_EXCEPTION, MAX_TRACEBACK, Failure


def raised(error: BaseException) -> BaseException:
    """Return the error as it is caught, with its traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def otherwise_raised(error: BaseException) -> BaseException:
    """Return the error from another place."""
    try:
        raise error
    except BaseException as caught:
        return caught


def test_one_cause_has_one_fingerprint_whatever_it_says() -> None:
    first = Failure.of(raised(ValueError("order 1")))
    assert first.fingerprint == Failure.of(raised(ValueError("order 2"))).fingerprint
    assert first.fingerprint != Failure.of(raised(KeyError("order 1"))).fingerprint
    other = Failure.of(otherwise_raised(ValueError("order 1")))
    assert first.fingerprint != other.fingerprint


def test_text_and_traceback_are_there_and_bounded() -> None:
    failure = Failure.of(raised(ValueError("x" * 100_000)))
    assert failure.exception.startswith("ValueError: xxx")
    assert len(failure.exception) <= MAX_EXCEPTION + 50
    assert len(failure.traceback) <= MAX_TRACEBACK + 50
    assert "in raised" in Failure.of(raised(ValueError())).traceback


def test_what_no_database_can_hold_is_written_out() -> None:
    failure = Failure.of(raised(ValueError("nul \x00 lone \ud800")))
    assert "\x00" not in failure.exception
    assert failure.exception.encode()
    assert failure.traceback.encode()


def test_an_error_that_was_never_raised() -> None:
    assert Failure.of(ValueError("told")).exception == "ValueError: told"
