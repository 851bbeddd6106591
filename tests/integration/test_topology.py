"""Services, topics, stages and databases in every arrangement.

The services run in one process. Only TXMSG["SERVICE"] distinguishes them.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection, transaction
from django.utils import timezone

from django_txmsg import stages
from django_txmsg.brokers import get_broker
from django_txmsg.brokers.base import Outgoing
from django_txmsg.consuming.consumer import Consumer
from django_txmsg.envelope.message import Message
from django_txmsg.errors import ConfigurationError
from django_txmsg.models import (
    DeadLetter,
    InboxMessage,
    OutboxMessage,
    QueueMessage,
    QueueSubscription,
    Worker,
    queue,
)
from django_txmsg.models.worker import silent_after
from django_txmsg.relaying.relay import Relay
from django_txmsg.sending.outbox import send_message
from tests.acceptance.crash_play import Manage
from tests.app.models import Effect
from tests.factories import WorkerFactory
from tests.faults import ManageProcess, wait_until
from tests.running import (
    at_work,
    committing,
    declared,
    running,
    send,
    ship,
    step,
    txmsg,
)

pytestmark = committing

#: A worker whose CONSUME["HEARTBEAT"] is 60 seconds.
SLOW = {"silent_after": silent_after(60)}
TOPIC, MAIL = "topic:orders.placed", "mail.send"


@contextmanager
def service(name: str) -> Iterator[None]:
    """Use another service's name while the block runs."""
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
    """Both stages have the same default name, and send to the same queue. The third
    service gets two messages, and drops neither as a duplicate."""
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


def told(*arguments: str) -> str:
    """Return the command's output."""
    out = StringIO()
    call_command(*arguments, stdout=out)
    return out.getvalue()


def test_the_subscription_of_a_stage_that_was_renamed_is_found_and_ended() -> None:
    with service("billing"):
        for name in ("billing.old", "billing.new"):
            with declared(note, TOPIC, name=name) as stage:
                step(stage)
        with service("shipping"), declared(note, TOPIC, name="a") as stage:
            step(stage)
        send(TOPIC, 1)
        send(TOPIC, 2)
        with declared(note, TOPIC, name="billing.new") as stage:
            lines = told("subscriptions", "list").splitlines()
            assert lines == [
                f"{TOPIC} billing.billing.new: 2 waiting",
                f"{TOPIC} billing.billing.old: 2 waiting, abandoned",
                f"{TOPIC} shipping.a: 2 waiting",
            ]
            listed = json.loads(told("subscriptions", "list", "--json"))
            assert [one["abandoned"] for one in listed] == [False, True, False]
            remove = f"subscriptions remove {TOPIC} billing.billing.old"
            assert remove in told("message_status")
            with pytest.raises(CommandError, match="declared here"):
                call_command("subscriptions", "remove", TOPIC, "billing.billing.new")
            # As during a deployment: it runs where the older code does.
            old = WorkerFactory(service="billing", stages=["billing.old"])
            assert "abandoned" not in told("subscriptions", "list")
            with pytest.raises(CommandError, match="or run by a live process"):
                call_command(*remove.split())
            old.delete()
            call_command(*remove.split(), verbosity=0)
            assert "subscriptions remove" not in told("message_status")
            send(TOPIC, 3)
            assert f"{TOPIC} billing.billing.new: 3" in told("subscriptions", "list")
    assert not QueueMessage.objects.filter(queue__endswith="old").exists()
    assert QueueMessage.objects.count() == 6


def test_a_live_process_keeps_its_subscription_in_another_database() -> None:
    """The embedded broker's database has no rows of workers. The command finds the live
    process in the other database, and refuses to remove its subscription."""
    with txmsg():
        with declared(note, TOPIC, name="old", broker="apart") as stage:
            step(stage)
        remove = f"subscriptions remove {TOPIC} tests.old --broker apart".split()
        worker = WorkerFactory(service="tests", stages=["old"])
        assert "abandoned" not in told("subscriptions", "list", "--broker", "apart")
        with pytest.raises(CommandError, match="or run by a live process"):
            call_command(*remove)
        worker.delete()
        assert "Removed" in told(*remove)
        assert TOPIC in told("txmsg", "audit")


@pytest.mark.parametrize("kind", ["rabbitmq", "rabbitmq_amqp", "activemq"])
def test_a_live_process_keeps_its_subscription_at_a_server(
    kind: str, request: pytest.FixtureRequest, destination: str
) -> None:
    """The command refuses to remove a live process's subscription. Otherwise RabbitMQ
    would delete the queue, although the process consumes it over STOMP."""
    topic, subscriber = f"topic:{destination}", f"tests.{destination}"
    server = request.getfixturevalue(kind)
    with txmsg(BROKERS={"default": {"URL": server.url()}}):
        with declared(note, topic, name=destination) as stage:
            step(stage)
        worker = WorkerFactory(service="tests", stages=[destination])
        with pytest.raises(CommandError, match="or run by a live process"):
            call_command("subscriptions", "remove", topic, subscriber)
        send(topic, 1)
        with declared(note, topic, name=destination) as stage, running(stage):
            wait_until(Effect.objects.exists)
        worker.delete()
        assert "Removed" in told("subscriptions", "remove", topic, subscriber)


@pytest.mark.parametrize("kind", ["database", "rabbitmq", "rabbitmq_amqp", "activemq"])
def test_a_service_that_retires_under_traffic_costs_the_other_one_nothing(
    kind: str, request: pytest.FixtureRequest, destination: str
) -> None:
    topic, left = f"topic:{destination}", f"{destination}.left"
    brokers = {}
    if kind != "database":
        url = request.getfixturevalue(kind).url()
        brokers = {"BROKERS": {"default": {"URL": url}}}
    with txmsg(**brokers):
        for name, owner in ((left, "ledger"), (destination, "tests")):
            with (
                txmsg(**brokers, SERVICE=owner),
                declared(note, topic, name=name) as stage,
            ):
                step(stage)  # subscribes
        with (
            declared(note, topic, name=destination) as stage,
            running(stage),
            at_work(Relay(["default"], ["default"])),
        ):
            for number in range(200):
                if number == 100:
                    told("subscriptions", "remove", topic, f"ledger.{left}")
                with transaction.atomic():
                    send_message(topic, number)
            wait_until(lambda: Effect.objects.count() >= 200, deadline=60)
            wait_until(lambda: not OutboxMessage.objects.filter(dispatched_at=None))
            wait_until(lambda: not QueueMessage.objects.all())
    assert Effect.objects.values("message_id").distinct().count() == 200
    assert Effect.objects.count() == 200
    assert not OutboxMessage.objects.exclude(attempts=0).exists()
    assert not DeadLetter.objects.exists()


def test_a_stage_that_was_given_another_topic_leaves_its_subscription() -> None:
    with txmsg():
        with declared(print, "topic:orders.v1", name="orders") as stage:
            step(stage)
        with declared(print, "topic:orders.v2", name="orders") as stage:
            step(stage)
            send("topic:orders.v1", 1)
            found = told("subscriptions", "list").splitlines()
            with pytest.raises(CommandError, match="it would miss messages"):
                call_command(
                    "subscriptions", "remove", "topic:orders.v2", "tests.orders"
                )
            told("subscriptions", "remove", "topic:orders.v1", "tests.orders")
            left = told("subscriptions", "list").splitlines()

    assert found == [
        "topic:orders.v1 tests.orders: 1 waiting, abandoned",
        "topic:orders.v2 tests.orders: 0 waiting",
    ]
    assert left == ["topic:orders.v2 tests.orders: 0 waiting"]


def test_an_unknown_subscription_is_not_reported_as_removed() -> None:
    """The command removes messages that arrived just as their subscription ended, and
    reports this. For an unknown subscription, the command fails."""
    QueueMessage.objects.create(queue=queue.queue_name(TOPIC, "tests.late"), body=b"1")
    with txmsg():
        assert "Removed" in told("subscriptions", "remove", TOPIC, "tests.late")
        with pytest.raises(CommandError, match="does not subscribe to"):
            call_command("subscriptions", "remove", TOPIC, "tests.late")
    assert not QueueMessage.objects.exists()


def test_many_messages_of_a_subscription_are_deleted_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue, "REMOVED_TOGETHER", 2)
    # No relay runs, which might still be sending one of the messages.
    with txmsg(), declared(note, TOPIC) as stage:
        step(stage)
        for number in range(5):
            send(TOPIC, number)
    assert QueueSubscription.objects.remove(TOPIC, f"tests.{TOPIC}") == 5
    assert not QueueMessage.objects.exists()
    assert not QueueSubscription.objects.exists()


def test_a_server_s_subscriptions_are_ended_and_not_listed() -> None:
    with txmsg(BROKERS={"default": {"URL": "stomp://127.0.0.1:1"}}):
        with pytest.raises(CommandError, match="is a server"):
            call_command("subscriptions", "list")
        with pytest.raises(CommandError, match="It is not removed: "):
            call_command("subscriptions", "remove", TOPIC, "billing.old")
    with txmsg(), pytest.raises(CommandError, match="No broker 'none'"):
        call_command("subscriptions", "list", "--broker", "none")


def test_a_queue_at_a_server_is_not_removed_as_a_subscription() -> None:
    """At RabbitMQ a subscription is a queue, so the name of any queue would do."""
    with (
        txmsg(
            BROKERS={"default": {"URL": "amqp://127.0.0.1:1"}},
            DEAD_LETTER_DESTINATIONS=["DLQ.mails"],
        ),
        declared(note, MAIL, name="mails"),
    ):
        for name, why in (
            (MAIL, "the queue of a stage that is declared here"),
            (f"{MAIL}.wait-64s", "delayed messages"),
            (f"{MAIL}.delay-1s", "delayed messages"),
            ("shop.txmsg.control", "control messages"),
            ("DLQ.mails", "the broker's dead letters"),
        ):
            with pytest.raises(CommandError, match=why):
                call_command("subscriptions", "remove", TOPIC, name, "--dry-run")
        would = told("subscriptions", "remove", TOPIC, "billing.old", "--dry-run")
        assert "Only the server's tools count its messages" in would


def consume(manage: Manage, name: str, stage: str) -> ManageProcess:
    return manage(
        *("consume", stage),
        hook="tests.integration.test_topology.declare",
        txmsg={"SERVICE": name, "CONSUME": {"HEARTBEAT": 0.2}},
        env={"STAGE": stage},
    )


def declare() -> None:
    """Declare a stage whose name both services use."""
    stages.stage(os.environ["STAGE"])(note)


def test_two_services_in_one_database_do_not_run_stages_of_one_name(
    manage: Manage, destination: str
) -> None:
    """Two services in one database declare a stage with the same name. The second
    service's worker is refused until the first worker has stopped."""
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
        ({"service": "billing", "silent_for": dt.timedelta(minutes=5)}, False),
        ({"service": "billing", "silent_for": dt.timedelta(seconds=40)}, False),
        ({"service": "billing", "silent_for": dt.timedelta(minutes=2), **SLOW}, True),
        ({"service": "billing", "stages": ["elsewhere"]}, False),
        ({"service": "tests"}, False),
        ({"service": ""}, False),  # of an earlier version
    ],
    ids=[
        *("at work", "silent", "silent for its heartbeat", "with a slow heartbeat"),
        *("other stages", "ourselves", "unknown"),
    ],
)
def test_services_that_conflict_are_refused(
    other: dict[str, Any], refused: bool
) -> None:
    given: dict[str, Any] = dict(other)
    if silent_for := given.pop("silent_for", None):
        given["heartbeat_at"] = timezone.now() - silent_for
    with txmsg(), declared(note) as stage:
        WorkerFactory(**{"stages": [stage.name], **given})
        consumer = Consumer([stage])
        if refused:
            with pytest.raises(ConfigurationError, match="same database"):
                consumer.run(once=True)
            assert Worker.objects.count() == 1
        else:
            consumer.run(once=True)


@pytest.mark.postgresql
def test_a_copy_stored_while_its_subscription_is_removed_is_deleted_too() -> None:
    QueueSubscription.objects.add(TOPIC, "old")

    def remove() -> int:
        try:
            return QueueSubscription.objects.remove(TOPIC, "old")
        finally:
            connection.close()

    def waits_for_a_lock() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
            return bool(cursor.fetchone()[0])

    with ThreadPoolExecutor(1) as pool, txmsg(), get_broker().open() as session:
        with transaction.atomic():
            session.send([Outgoing(TOPIC, {}, b"{}")])
            removed = pool.submit(remove)
            wait_until(lambda: removed.done() or waits_for_a_lock())
        assert removed.result(timeout=30) == 1
    assert not QueueMessage.objects.exists()
