"""The setting TXMSG: an error names the unknown or wrongly typed key, and says what to
do."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
from django.test import override_settings
from django.views.debug import get_default_exception_reporter_filter
from hypothesis import given

from django_txmsg import RedeliveryPolicy, conf, wire
from django_txmsg.envelope.message import check_destination
from django_txmsg.errors import ConfigurationError


def test_defaults_are_the_contract() -> None:
    with override_settings(TXMSG={}):
        settings = conf.get()

    assert settings.BROKERS == {"default": {"URL": "database://"}}
    assert settings.REQUIRE_ATOMIC is True
    assert settings.DISPATCH_ON_COMMIT == "thread"
    relay = settings.RELAY
    assert (relay.BATCH_SIZE, relay.POLL_INTERVAL, relay.LEASE) == (500, 1.0, 60)
    again = settings.REDELIVERY
    assert (again.MAX_REDELIVERIES, again.INITIAL_DELAY) == (6, 1.0)
    assert (again.BACKOFF, again.MAX_DELAY, again.JITTER) == (2.0, 300.0, 0.15)
    assert again.MODE == "non_blocking"
    http = settings.HTTP
    assert http.CONTROL_MESSAGE == "before_commit"
    assert (http.ON_CONTROL_FAILURE, http.MAX_COMMIT_DURATION) == ("commit", 15.0)
    kept = settings.RETENTION
    assert (kept.OUTBOX, kept.INBOX, kept.DEAD_LETTERS) == (7, 14, None)
    assert settings.LAKE is None


@pytest.mark.parametrize(
    ("txmsg", "path", "words"),
    [
        ({"SERVCE": "x"}, 'TXMSG["SERVCE"]', 'Did you mean "SERVICE"?'),
        (
            {"RELAY": {"BATCHSIZE": 1}},
            'TXMSG["RELAY"]["BATCHSIZE"]',
            'Did you mean "BATCH_SIZE"?',
        ),
        ({"RELAY": {"BATCH_SIZE": "5"}}, 'TXMSG["RELAY"]["BATCH_SIZE"]', "an integer"),
        ({"RELAY": {"BATCH_SIZE": 0}}, 'TXMSG["RELAY"]["BATCH_SIZE"]', "than zero"),
        (
            {"PIPELINE": {"LATE_AFTER": {"mails.*": "1d"}}},
            'TXMSG["PIPELINE"]["LATE_AFTER"]',
            "a dict of numbers",
        ),
        (
            {"PIPELINE": {"EXTERNALS": []}},
            'TXMSG["PIPELINE"]["EXTERNALS"]',
            'Did you mean "EXTERNAL"?',
        ),
        (
            {"HTTP": {"COMMIT_DELAY_INCREMENT": 0}},
            'TXMSG["HTTP"]["COMMIT_DELAY_INCREMENT"]',
            "than zero",
        ),
        (
            {"HTTP": {"MAX_COMMIT_DURATION": -1}},
            'TXMSG["HTTP"]["MAX_COMMIT_DURATION"]',
            "than zero",
        ),
        ({"RELAY": 5}, 'TXMSG["RELAY"]', "must be a dict"),
        ({"DISPATCH_ON_COMMIT": "soon"}, 'TXMSG["DISPATCH_ON_COMMIT"]', '"thread"'),
        ({"REQUIRE_ATOMIC": 1}, 'TXMSG["REQUIRE_ATOMIC"]', "a bool"),
        ({"RETENTION": {"INBOX": "x"}}, 'TXMSG["RETENTION"]["INBOX"]', "or None"),
        ({"BROKERS": {}}, 'TXMSG["BROKERS"]', "default"),
        (
            {"BROKERS": {"default": {"URL": "database://"}, "b" * 65: {"URL": "x"}}},
            f'TXMSG["BROKERS"]["{"b" * 65}"]',
            "64 characters",
        ),
        ({"REDELIVERY": {"BACKOFF": 0.5}}, 'TXMSG["REDELIVERY"]["BACKOFF"]', "1 and"),
        ({"REDELIVERY": {"JITTER": 2}}, 'TXMSG["REDELIVERY"]["JITTER"]', "0 and 1"),
        ({"RELAY": {"LEASE": math.nan}}, 'TXMSG["RELAY"]["LEASE"]', "at most"),
        ({"RELAY": {"LEASE": math.inf}}, 'TXMSG["RELAY"]["LEASE"]', "at most"),
        ({"CONSUME": {"HEARTBEAT": 61}}, 'TXMSG["CONSUME"]["HEARTBEAT"]', "most 60"),
        ({"CONSUME": {"MAX_MESSAGES": -1}}, 'TXMSG["CONSUME"]["MAX_MESSAGES"]', "0 or"),
        ({"RELAY": {"LEASE": 0.999}}, 'TXMSG["RELAY"]["LEASE"]', "at least 1, not"),
        ({"HTTP": {"CONTROL_GROUP": 61}}, 'TXMSG["HTTP"]["CONTROL_GROUP"]', "most 60"),
        ({"RETENTION": {"INBOX": 1e9}}, 'TXMSG["RETENTION"]["INBOX"]', "36,525"),
        ({"SERVICE": ""}, 'TXMSG["SERVICE"]', "letters, digits"),
        ({"SERVICE": "my shop/1"}, 'TXMSG["SERVICE"]', "letters, digits"),
        ({"SERVICE": "s" * 101}, 'TXMSG["SERVICE"]', "at most 100"),
        ({"SERVICE": 1}, 'TXMSG["SERVICE"]', "a string"),
        (
            {"DEAD_LETTER_DESTINATIONS": ["DLQ", ""]},
            'TXMSG["DEAD_LETTER_DESTINATIONS"]',
            "empty",
        ),
        (
            {"DEAD_LETTER_DESTINATIONS": ["/queue/DLQ"]},
            'TXMSG["DEAD_LETTER_DESTINATIONS"]',
            "write 'DLQ'",
        ),
        ({"REPLY_TO": ["erp.in", "erp in"]}, 'TXMSG["REPLY_TO"]', "'erp in' has"),
        ({"FORMER_SERVICES": ["a", "my shop"]}, 'TXMSG["FORMER_SERVICES"]', "letters,"),
        ({"ALERTS": {"KINDS": "bad"}}, 'TXMSG["ALERTS"]["KINDS"]', 'Give ["bad"].'),
        (
            {"BROKERS": {"default": {"URl": "database://"}}},
            'TXMSG["BROKERS"]["default"]',
            "URL",
        ),
    ],
)
def test_wrong_setting_is_named_with_a_hint(
    txmsg: dict[str, Any], path: str, words: str
) -> None:
    with override_settings(TXMSG=txmsg):
        [problem] = conf.problems()
        with pytest.raises(ConfigurationError, match="TXMSG"):
            conf.get()

    assert problem.path == path
    assert words in f"{problem.message} {problem.hint}"


def test_least_values_and_queues_with_a_broker_s_own_names_are_valid() -> None:
    with override_settings(
        TXMSG={
            "RELAY": {"LEASE": 1},
            "CONSUME": {"MAX_MESSAGES": 0},
            "HTTP": {"CONTROL_GROUP": 60},
            "DEAD_LETTER_DESTINATIONS": ["orders:dead letters"],
            "REPLY_TO": ["topic:erp.in"],
            "FORMER_SERVICES": ["my.shop-2"],
        }
    ):
        assert conf.problems() == []


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "MAX_REDELIVERIES": st.integers(-2, 3) | st.integers(),
            "INITIAL_DELAY": st.floats() | st.integers(-1, 3),
            "BACKOFF": st.floats() | st.floats(0, 3),
            "MAX_DELAY": st.floats() | st.floats(-1, 1e12),
            "JITTER": st.floats() | st.floats(-0.5, 1.5),
            "MODE": st.sampled_from(["blocking", "non_blocking", "broker", "x"]),
        },
    )
)
def test_invalid_policy_values_are_invalid_settings(values: dict[str, Any]) -> None:
    try:
        RedeliveryPolicy(**{name.lower(): value for name, value in values.items()})
    except ValueError:
        possible = False
    else:
        possible = True
    with override_settings(TXMSG={"REDELIVERY": values}):
        assert (conf.problems() == []) == possible


@pytest.mark.parametrize("service", ["shop", "Shop_1", "my.shop-2", "_", "s" * 100])
def test_every_service_name_that_is_taken_makes_a_destination(service: str) -> None:
    with override_settings(TXMSG={"SERVICE": service}):
        name = wire.control_destination(conf.get().SERVICE)
    assert check_destination(name) == name


def test_a_long_value_is_not_repeated_it_may_be_a_secret() -> None:
    secret = "stomp://user:a-long-password@host:61613"
    with override_settings(TXMSG={"RELAY": {"LEASE": secret}}):
        [problem] = conf.problems()

    assert "password" not in problem.message


@pytest.mark.parametrize("url", [b"stomp://a:b@h", ["stomp://a:b@h"]])
def test_url_of_a_wrong_type_is_not_repeated(url: object) -> None:
    with override_settings(TXMSG={"BROKERS": {"default": {"URL": url}}}):
        [problem] = conf.problems()

    assert problem.message == f"must be a string, not {type(url).__name__}."


def test_override_settings_takes_effect_and_ends() -> None:
    before = conf.get().SERVICE
    with override_settings(TXMSG={"SERVICE": "elsewhere"}):
        assert conf.get().SERVICE == "elsewhere"

    assert before == conf.get().SERVICE


def test_a_lake_is_a_uri_or_a_dict() -> None:
    with override_settings(TXMSG={"LAKE": "file:///var/lake"}):
        lake = conf.get().LAKE
    assert lake is not None
    assert (lake.URI, lake.STORAGE_OPTIONS) == ("file:///var/lake", {})
    assert (lake.KEEP_BODIES, lake.READER) == (True, None)

    options = {"AWS_SECRET_ACCESS_KEY": "hidden"}
    given = {
        "URI": "s3://b/l", "STORAGE_OPTIONS": options, "KEEP_BODIES": False,
        "READER": "postgresql://u:hidden@replica/shop",
    }  # fmt: skip
    with override_settings(TXMSG={"LAKE": given}):
        lake = conf.get().LAKE
        reporter = get_default_exception_reporter_filter()
        shown = repr(reporter.get_safe_settings()["TXMSG"]) + repr(conf.get())
    assert lake is not None
    assert {name: getattr(lake, name) for name in given} == given
    assert "hidden" not in shown


@pytest.mark.parametrize(
    ("lake", "path"),
    [
        (7, 'TXMSG["LAKE"]'),
        ("", 'TXMSG["LAKE"]'),
        ({"KEEP_BODIES": True}, 'TXMSG["LAKE"]'),
        ({"URI": "/l", "STORAGE": {}}, 'TXMSG["LAKE"]["STORAGE"]'),
        (
            {"URI": "/l", "STORAGE_OPTIONS": {"a": 1}},
            'TXMSG["LAKE"]["STORAGE_OPTIONS"]',
        ),
        ({"URI": "/l", "KEEP_BODIES": "no"}, 'TXMSG["LAKE"]["KEEP_BODIES"]'),
        ({"URI": "/l", "READER": 1}, 'TXMSG["LAKE"]["READER"]'),
    ],
)
def test_what_is_wrong_with_a_lake_is_named(lake: Any, path: str) -> None:
    with override_settings(TXMSG={"LAKE": lake}):
        assert [one.path for one in conf.problems()] == [path]
