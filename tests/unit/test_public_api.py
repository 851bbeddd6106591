"""The names a user types. Dropping or renaming one breaks somebody's code."""

from __future__ import annotations

import inspect
import subprocess
import sys

import django_txmsg
from django_txmsg import Message, RedeliveryPolicy, send_message, send_messages, stage

NAMES = [
    "Message",
    "Redeliver",
    "RedeliveryPolicy",
    "Refuse",
    "no_outbox",
    "outbox_session",
    "send_message",
    "send_messages",
    "stage",
]


def test_the_public_names_are_these() -> None:
    assert sorted(django_txmsg.__all__) == NAMES
    for name in NAMES:
        assert getattr(django_txmsg, name) is not None
        assert name in dir(django_txmsg)


def test_send_message_takes_the_contract_s_arguments() -> None:
    names = list(inspect.signature(send_message).parameters)

    assert names[:2] == ["destination", "body"]
    assert set(names[2:]) >= {
        "headers", "message_id", "key", "delay", "expires", "using", "broker",
    }  # fmt: skip
    assert set(inspect.signature(send_messages).parameters) >= {"using", "broker"}


def test_stage_takes_the_contract_s_arguments() -> None:
    parameters = inspect.signature(stage).parameters

    assert set(parameters) >= {
        "destination", "name", "transaction", "redelivery", "isolation", "using",
        "concurrency", "broker", "batch",
    }  # fmt: skip
    assert parameters["transaction"].default == "outbox"


def test_a_policy_has_the_contract_s_fields() -> None:
    policy = RedeliveryPolicy()

    assert policy.max_attempts == 7
    assert (policy.initial_delay, policy.backoff, policy.max_delay) == (1.0, 2.0, 300.0)
    assert (policy.jitter, policy.mode, policy.refuse_on) == (0.15, "non_blocking", ())


def test_a_message_has_the_contract_s_fields() -> None:
    assert set(Message.__slots__) >= {
        "id", "destination", "body", "headers", "key", "created_at",
        "delivery_attempt", "redelivered", "correlation_id",
    }  # fmt: skip


def test_importing_the_package_imports_no_django() -> None:
    code = (
        "import sys; sys.modules['django'] = None; import django_txmsg;"
        "import django_txmsg.wire, django_txmsg.jms, django_txmsg.envelope.message;"
        "from django_txmsg import Message, RedeliveryPolicy, Refuse; print('ok')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )

    assert result.stdout.strip() == "ok", result.stderr
