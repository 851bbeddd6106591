"""Who is there: services, topics, stages and databases, in every shape a system has.

Services are told apart by TXMSG["SERVICE"] alone, as processes of their own are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from django_txmsg import stages
from django_txmsg.consuming.consumer import Consumer
from django_txmsg.envelope.message import Message
from django_txmsg.errors import ConfigurationError
from django_txmsg.models import InboxMessage, OutboxMessage, Worker
from django_txmsg.sending.outbox import send_message
from tests.acceptance.crash_play import Manage
from tests.app.models import Effect
from tests.factories import WorkerFactory, ago
from tests.faults import ManageProcess, wait_until
from tests.running import committing, declared, send, ship, step, txmsg

pytestmark = committing

TOPIC, MAIL = "topic:orders.placed", "mail.send"


@contextmanager
def service(name: str) -> Iterator[None]:
    """Be another service for the duration of the block."""
    with txmsg(SERVICE=name):
        yield


def mail(message: Message) -> None:
    send_message(MAIL, message.body)


def note(message: Message) -> None:
    Effect.objects.create(name=str(message.service), message_id=str(message.id))


@pytest.mark.parametrize(
    "options",
    [{}, {"batch": 5}, {"transaction": "best_effort_1pc"}],
    ids=["alone", "batch", "best_effort_1pc"],
)
def test_two_services_on_one_topic_send_two_messages_to_a_third(
    options: dict[str, Any],
) -> None:
    """Both call their stage by the destination, as by default, and both send to one
    target: it has two messages, and neither is taken for a copy of the other."""
    consumers = {"billing": "default", "shipping": "other"}
    for name, using in consumers.items():
        with service(name), declared(mail, TOPIC, using=using, **options) as stage:
            step(stage)  # subscribes, and finds nothing
    with service("shop"):
        send(TOPIC, 1)
        send(TOPIC, 2)
    for name, using in consumers.items():
        with service(name), declared(mail, TOPIC, using=using, **options) as stage:
            step(stage, times=2)
            ship(using)
    with service("mail"), declared(note, MAIL) as stage:
        step(stage, times=4)
    got = sorted(Effect.objects.values_list("name", flat=True))
    assert got == ["billing", "billing", "shipping", "shipping"]
    assert InboxMessage.objects.filter(stage=MAIL).count() == 4
    for using in consumers.values():
        assert not OutboxMessage.objects.using(using).filter(dead_at__isnull=False)


def consume(manage: Manage, name: str, stage: str) -> ManageProcess:
    return manage(
        *("consume", stage),
        hook="tests.integration.test_topology.declare",
        txmsg={"SERVICE": name, "CONSUME": {"HEARTBEAT": 0.2}},
        env={"STAGE": stage},
    )


def declare() -> None:
    """In the worker: a stage that any service might have."""
    stages.stage(os.environ["STAGE"])(note)


def test_two_services_in_one_database_do_not_run_stages_of_one_name(
    manage: Manage, destination: str
) -> None:
    """The second one is refused, until the first is gone."""
    first = consume(manage, "billing", destination)
    wait_until(Worker.objects.exists, message=lambda: first.output)
    second = consume(manage, "shipping", destination)
    assert second.wait() == 1
    assert f"'billing' (process {first.pid} on" in second.output
    assert f"stage '{destination}' in the same database" in second.output
    with service("shop"):
        send(destination, 1)
    wait_until(Effect.objects.exists, message=lambda: first.output)
    first.terminate()
    first.succeed()
    third = consume(manage, "shipping", destination)
    with service("shop"):
        send(destination, 2)
    wait_until(lambda: Effect.objects.count() == 2, message=lambda: third.output)
    third.terminate()
    third.succeed()


@pytest.mark.parametrize(
    ("other", "refused"),
    [
        ({"service": "billing"}, True),
        ({"service": "billing", "heartbeat_at": ago(minutes=5)}, False),
        ({"service": "billing", "stages": ["elsewhere"]}, False),
        ({"service": "tests"}, False),
        ({"service": ""}, False),  # of an earlier version
    ],
    ids=["at work", "silent", "other stages", "ourselves", "unknown"],
)
def test_who_is_in_whose_way(other: dict[str, Any], refused: bool) -> None:
    with txmsg(), declared(note) as stage:
        WorkerFactory(**{"stages": [stage.name], **other})
        consumer = Consumer([stage])
        if refused:
            with pytest.raises(ConfigurationError, match="same database"):
                consumer.run(once=True)
            assert Worker.objects.count() == 1
        else:
            consumer.run(once=True)
