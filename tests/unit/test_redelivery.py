"""decide() is a pure function, so Hypothesis tests it with random inputs."""

from __future__ import annotations

import builtins
import datetime as dt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_txmsg.envelope.redelivery import (
    Dead,
    RedeliverAfter,
    RedeliveryPolicy,
    decide,
)
from django_txmsg.errors import DecodeError, Redeliver, Refuse

policies = st.builds(
    RedeliveryPolicy,
    max_redeliveries=st.integers(0, 20),
    initial_delay=st.floats(0, 1000),
    backoff=st.floats(1, 10),
    max_delay=st.floats(0, 10_000),
    jitter=st.floats(0, 1),
)


@given(policies, st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_delays_keep_within_the_ceiling_and_its_jitter(
    policy: RedeliveryPolicy, attempt: int, dice: float
) -> None:
    delay = policy.delay(attempt, lambda: dice)
    assert 0 <= delay <= policy.max_delay * (1 + policy.jitter)


@given(policies)
def test_delays_never_shrink_until_the_ceiling(policy: RedeliveryPolicy) -> None:
    delays = [policy.delay(attempt, lambda: 0.5) for attempt in range(1, 30)]
    assert delays == sorted(delays)


@given(policies, st.integers(1, 40))
def test_the_last_attempt_is_the_maximum(policy: RedeliveryPolicy, at: int) -> None:
    decision = decide(policy, at, ValueError())
    assert isinstance(decision, Dead) == (at >= policy.max_redeliveries + 1)


def test_the_defaults_are_activemqs() -> None:
    policy = RedeliveryPolicy(jitter=0.0)
    assert policy.max_attempts == 7
    delays = [policy.delay(attempt) for attempt in range(1, 11)]
    assert delays == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]


def test_without_an_initial_delay_no_attempt_is_delayed() -> None:
    policy = RedeliveryPolicy(initial_delay=0.0, max_redeliveries=2000)
    assert {policy.delay(attempt) for attempt in (1, 1024, 1025, 2000)} == {0.0}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Refuse("no"), Dead("refused")),
        (KeyError("k"), Dead("refused")),
        (DecodeError("malformed", "no JSON"), Dead("malformed")),
        (Redeliver(after=7.5), RedeliverAfter(7.5)),
        (ValueError(), RedeliverAfter(1.0)),
    ],
)
def test_each_error_has_its_decision(error: Exception, expected: object) -> None:
    policy = RedeliveryPolicy(refuse_on=(LookupError,), jitter=0.0)
    assert decide(policy, 1, error) == expected


def test_redeliver_obeys_the_maximum_of_attempts() -> None:
    policy = RedeliveryPolicy(max_redeliveries=1)
    assert decide(policy, 2, Redeliver(after=1.0)) == Dead("attempts_exhausted")


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_redeliveries": -1},
        {"initial_delay": -0.1},
        {"backoff": 0.5},
        {"jitter": 1.1},
        {"initial_delay": float("inf")},
        {"max_delay": float("nan")},
        {"max_delay": 1e12},
        {"mode": "sometimes"},
        {"initial_delay": dt.timedelta(seconds=1)},
        {"backoff": "2"},
        {"jitter": True},
        {"refuse_on": ValueError},
        {"refuse_on": "ValueError"},
    ],
)
def test_an_invalid_policy_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RedeliveryPolicy(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "after", [-1.0, 1e12, float("inf"), float("-inf"), float("nan")]
)
def test_delay_over_a_hundred_years_is_refused(after: float) -> None:
    with pytest.raises(ValueError, match="hundred years"):
        Redeliver(after=after)


#: Python 3.10 has none.
Group: Any = getattr(builtins, "ExceptionGroup", None)

if Group is not None:

    def test_an_exception_group_counts_like_each_exception_in_it() -> None:
        policy = RedeliveryPolicy(max_redeliveries=1, jitter=0, refuse_on=(KeyError,))
        nested = Group("", [ValueError(), Group("", [KeyError()])])
        later = Group("", [Redeliver(after=30.0), Redeliver(after=60.0)])
        assert decide(policy, 1, Group("", [ValueError()])) == RedeliverAfter(1.0)
        assert decide(policy, 1, nested) == Dead("refused")
        assert decide(policy, 1, Group("", [Refuse("")])) == Dead("refused")
        assert decide(policy, 1, later) == RedeliverAfter(60.0)
        assert decide(policy, 2, later) == Dead("attempts_exhausted")
