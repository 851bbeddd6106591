"""What the package stores of an exception is enough to understand the failure, and is
not too large."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from django_txmsg import stages
from django_txmsg.envelope.failure import MAX_EXCEPTION, MAX_TRACEBACK, Failure
from django_txmsg.errors import ConfigurationError
from tests.hostile_errors import HOSTILE, misspelt


def raised(error: BaseException) -> BaseException:
    """Raise and catch the error, and return it with its traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def otherwise_raised(error: BaseException) -> BaseException:
    """Do the same as raised(). This is another function, so the error gets another
    fingerprint."""
    try:
        raise error
    except BaseException as caught:
        return caught


def test_one_cause_has_one_fingerprint_for_any_message() -> None:
    first = Failure.of(raised(ValueError("order 1")))
    assert first.fingerprint == Failure.of(raised(ValueError("order 2"))).fingerprint
    assert first.fingerprint != Failure.of(raised(KeyError("order 1"))).fingerprint
    other = Failure.of(otherwise_raised(ValueError("order 1")))
    assert first.fingerprint != other.fingerprint


def module(name: str, path: str) -> dict[str, Any]:
    """Return a module with a function `handle` that fails."""
    there: dict[str, Any] = {"__name__": name}
    code = "def handle():\n    raise ValueError('no stock')\n"
    exec(compile(code, path, "exec"), there)
    return there


def test_functions_of_one_name_in_two_apps_are_two_causes() -> None:
    def fingerprint(name: str, path: str) -> str:
        with pytest.raises(ValueError, match="no stock") as caught:
            module(name, path)["handle"]()
        return Failure.of(caught.value).fingerprint

    shipping = fingerprint("shipping.stages", "/srv/shipping/stages.py")
    billing = fingerprint("billing.stages", "/srv/billing/stages.py")

    assert shipping != billing
    # Where it is installed is no matter.
    assert billing == fingerprint("billing.stages", "/elsewhere/billing/stages.py")


def test_what_we_raise_has_its_cause_where_the_application_called_us() -> None:
    def fingerprint(name: str, path: str) -> str:
        there: dict[str, Any] = {"__name__": name}
        code = "def handle(refuse):\n    refuse(['nobody'])\n"
        exec(compile(code, path, "exec"), there)
        with pytest.raises(ConfigurationError, match="nobody") as caught:
            there["handle"](stages.find)
        return Failure.of(caught.value).fingerprint

    shipping = fingerprint("shipping.stages", "/srv/shipping/stages.py")
    assert shipping != fingerprint("billing.stages", "/srv/billing/stages.py")


def test_what_a_broker_refuses_for_different_reasons_is_not_one_cause() -> None:
    def fingerprint(detail: str) -> str:
        return Failure.because("rejected", detail).fingerprint

    large = fingerprint("maximum frame size 1048576 exceeded by 2000001 bytes")
    denied = fingerprint("ACCESS_REFUSED - access to queue 'a' refused for user 'x'")

    assert large != denied
    assert large == fingerprint("maximum frame size 1048576 exceeded by 7 bytes")
    ids = ("0198c6a2-7d1e-7c3b-9c55-0a3d1e5b7f42", "d94f3f01e3a94ec4b9a5f0f3f9a1a6c2")
    assert len({fingerprint(f"no consumer for {one} left") for one in ids}) == 1
    assert large != Failure.because("expired", "maximum frame size # exceeded by # b")


def test_text_and_traceback_are_there_and_bounded() -> None:
    failure = Failure.of(raised(ValueError("x" * 100_000)))
    assert failure.exception.startswith("ValueError: xxx")
    assert len(failure.exception) <= MAX_EXCEPTION + 50
    assert len(failure.traceback) <= MAX_TRACEBACK + 50
    assert "in raised" in Failure.of(raised(ValueError())).traceback


def as_the_package_caught(call: Callable[[], object]) -> BaseException:
    """Return the error that a call raises, with a traceback that begins inside the
    package."""
    with pytest.raises((ValueError, ConfigurationError)) as caught:
        call()
    return caught.value.with_traceback(caught.tb.tb_next)


def test_traceback_begins_with_the_application() -> None:
    """The stored traceback omits the package's own lines, because they would hide the
    user's line."""

    def handler(message: Any) -> None:
        raise raised(ValueError("no stock"))

    following: Any = stages.CallNext(None, handler)  # type: ignore[arg-type]
    failure = Failure.of(as_the_package_caught(partial(following, None)))

    assert "in handler" in failure.traceback
    assert "stages.py" not in failure.traceback


def test_traceback_of_the_packages_own_error_is_complete() -> None:
    failure = Failure.of(as_the_package_caught(partial(stages.find, ["x"])))

    assert "stages.py" in failure.traceback


def test_unstorable_characters_are_escaped() -> None:
    failure = Failure.of(raised(ValueError("nul \x00 lone \ud800")))
    assert "\x00" not in failure.exception
    assert failure.exception.encode()
    assert failure.traceback.encode()


def test_error_that_was_never_raised_has_its_text() -> None:
    assert Failure.of(ValueError("told")).exception == "ValueError: told"


def test_a_verdict_holds_what_every_database_can_store() -> None:
    failure = Failure.because("invalid_body", "a\x00b\ud800")

    assert failure.exception == "a\\x00b\\ud800"


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_exception_whose_code_raises_is_stored_by_its_type(kind: str) -> None:
    error, said = HOSTILE[kind]

    failure = Failure.of(raised(error("no stock")))

    assert failure.exception.partition(": no stock")[0].endswith(said)
    assert "in raised" in failure.traceback
    again = Failure.of(raised(error("other")))
    assert failure.fingerprint == again.fingerprint
    assert failure.fingerprint != Failure.of(otherwise_raised(error())).fingerprint


def test_a_misspelt_validation_error_is_kept_as_one() -> None:
    failure = Failure.of(raised(misspelt()))
    assert failure.exception.endswith("ValidationError: <str() raised KeyError>")
