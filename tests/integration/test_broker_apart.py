"""The embedded broker's queues are in a database that stores nothing else of this
project."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections
from django.test import Client

from django_txmsg import health, tasks
from django_txmsg.management.commands._run import Service
from django_txmsg.metrics import Collector
from django_txmsg.models import OutboxMessage, QueueMessage, QueueSubscription
from django_txmsg.models.queue import queue_name
from django_txmsg.monitoring import alarms, databases, status
from django_txmsg.monitoring.retention import Pruner
from tests import factories
from tests.running import committing, declared, txmsg

pytestmark = pytest.mark.django_db(databases=["default", "other"])

APART = {"default": {"URL": "database://other?poll=0.01"}}


def put(factory: Any, **columns: Any) -> None:
    """Store a row in the database of the queues."""
    factory.build(**columns).save(using="other")


def reported() -> tuple[dict[str, Any], int]:
    """Return the output of `message_status --json`, and its exit code."""
    out, code = StringIO(), 0
    try:
        call_command("message_status", "--json", stdout=out)
    except SystemExit as ended:
        code = int(ended.code or 0)
    return json.loads(out.getvalue()), code


def samples(name: str, by: str = "database") -> dict[str, float]:
    """Return the values of a metric by one of its labels."""
    return {
        sample.labels[by]: sample.value
        for family in Collector().collect()
        for sample in family.samples
        if sample.name == f"txmsg_{name}"
    }


def test_every_report_counts_the_queues_and_only_them(admin_client: Client) -> None:
    for minutes in (5, 45):
        put(
            factories.QueueMessageFactory,
            queue="mails.confirm",
            available_at=factories.ago(minutes=minutes),
        )
    # The database may be another service's, which watches its own rows, and its own
    # queues: their stages may be paused there.
    put(
        factories.QueueMessageFactory,
        queue="reports.make",
        available_at=factories.ago(minutes=99),
    )
    put(factories.OutboxMessageFactory, created_at=factories.ago(hours=1))
    put(factories.DeadLetterFactory)

    with txmsg(BROKERS=APART), declared(print, "mails.confirm"):
        facts, code = reported()
        found = health.look()
        page = admin_client.get("/admin/django_txmsg/").content.decode()
        waiting = samples("queue_waiting", by="destination")

    assert (facts["queued"]["overdue"], code) == (2, 1)
    counts = {name: one["count"] for name, one in facts["queues"].items()}
    assert counts == {"mails.confirm in other": 2, "reports.make in other": 1}
    assert facts["databases"] == ["default", "other"]
    assert (facts["outbox"]["count"], facts["dead"]["count"]) == (0, 0)
    assert (found["status"], found["oldest"]["outbox"]) == ("stuck", 0)
    assert found["databases"]["other"] == found["oldest"]["queue"]
    assert found["oldest"]["queue"] // 60 == 45
    assert "mails.confirm in other" in page
    assert waiting == {"mails.confirm": 2, "reports.make": 1}


def test_overdue_messages_of_other_services_are_only_a_warning() -> None:
    """No service may consume the queue any more, but another may have paused its
    stage."""
    put(factories.QueueMessageFactory, queue="bills.make")  # due now
    for queue in ("reports.make", "mailing.txmsg.control"):
        put(
            factories.QueueMessageFactory,
            queue=queue,
            available_at=factories.ago(minutes=99),
        )

    with txmsg(BROKERS=APART):
        others = reported(), health.look()["status"]
        put(
            factories.QueueMessageFactory,
            queue="tests.txmsg.control",
            available_at=factories.ago(minutes=99),
        )
        own = reported(), health.look()["status"]

    (facts, code), state = others
    assert (facts["queued"]["count"], facts["overdue"], code) == (3, 0, 0)
    assert state == "ok"
    (warning,) = [one for one in facts["alarms"] if "no stage here consumes" in one]
    assert "for 1 h 39 min: " in warning
    assert "reports.make in other" in warning
    assert "bills.make" not in warning
    (facts, code), state = own
    assert (facts["overdue"], code, state) == (1, 1, "stuck")


def test_an_abandoned_subscription_is_reported_once_with_its_messages() -> None:
    with txmsg():  # broker "apart" has its queues in the other database
        subscription = {"topic": "topic:paid", "subscriber": "tests.gone"}
        QueueSubscription.objects.using("other").create(**subscription)
        put(
            factories.QueueMessageFactory,
            queue=queue_name(*subscription.values()),
            available_at=factories.ago(minutes=99),
        )
        found = alarms.of(status.read())

    (alarm,) = [one for one in found if "tests.gone" in str(one)]
    assert "1 so far" in str(alarm)
    assert "remove topic:paid tests.gone --broker apart." in str(alarm)


def test_abandoned_subscriptions_of_two_brokers_are_two_alerts() -> None:
    with txmsg():
        for using in ("default", "other"):
            QueueSubscription.objects.using(using).create(
                topic="topic:paid", subscriber="tests.gone"
            )
        found = [one.about for one in alarms.of(status.read())]

    assert found.count("topic:paid tests.gone") == 1
    assert "topic:paid tests.gone in other" in found


def test_the_database_of_the_queues_does_not_answer() -> None:
    def refuse(*arguments: Any) -> Any:
        raise OperationalError("refused")

    with txmsg(BROKERS=APART), connections["other"].execute_wrapper(refuse):
        facts, code = reported()
        found = health.look()
        unreadable = samples("database_unreadable")

    assert (facts["unreadable"], code) == ({"other": "refused"}, 1)
    assert (found["status"], found["databases"]["other"]) == ("stuck", "no answer")
    assert unreadable == {"default": 0, "other": 1}


def pruned_by_run() -> None:
    """Prune like `txmsg run`."""
    loops = Service(databases.with_tables(), ["default"], [])._time_loops
    (pruner,) = [one for one in loops if isinstance(one, Pruner)]
    for using in pruner.using:
        pruner._keep(using)


@pytest.mark.parametrize(
    "prune",
    [
        lambda: call_command("prune_messages", verbosity=0),
        lambda: call_command("prune_messages", "--database", "other", verbosity=0),
        tasks.prune_messages,
        pruned_by_run,
    ],
    ids=["command", "named", "task", "run"],
)
def test_old_control_messages_are_pruned_and_nothing_else(
    prune: Callable[[], object],
) -> None:
    put(
        factories.OutboxMessageFactory,
        dispatched=True,
        created_at=factories.ago(days=99),
    )
    for queue in ("tests.txmsg.control", "mailing.txmsg.control"):
        put(factories.QueueMessageFactory, queue=queue)
    queued = QueueMessage.objects.using("other")
    queued.update(enqueued_at=factories.ago(days=2))

    with txmsg(BROKERS=APART):
        prune()

    assert [one.queue for one in queued.all()] == ["mailing.txmsg.control"]
    assert OutboxMessage.objects.using("other").exists()


@pytest.mark.parametrize(
    "prune",
    [partial(call_command, "prune_messages", verbosity=0), tasks.prune_messages],
    ids=["command", "task"],
)
def test_own_messages_beside_the_queues_are_pruned_if_the_database_is_named(
    prune: Callable[..., object],
) -> None:
    """`send_message(using=)` stores them there. No setting names the database."""
    for service in ("tests", "mailing"):
        for days in (1, 99):
            put(
                factories.OutboxMessageFactory,
                service=service,
                dispatched=True,
                created_at=factories.ago(days=days),
            )
    outbox = OutboxMessage.objects.using("other")

    with txmsg(BROKERS=APART):
        prune()
        assert outbox.count() == 4
        prune(database="other")

    assert outbox.filter(service="mailing").count() == 2
    assert outbox.filter(service="tests").count() == 1


@pytest.fixture
def without_a_table(transactional_db: None) -> Iterator[None]:
    """Take a table away from the database of the queues."""
    rename = "ALTER TABLE {} RENAME TO {}"
    tables = [OutboxMessage._meta.db_table, "taken_away"]
    with connections["other"].cursor() as cursor:
        cursor.execute(rename.format(*tables))
        yield
        cursor.execute(rename.format(*reversed(tables)))


@committing
def test_a_forgotten_migration_is_reported(without_a_table: None) -> None:
    out = StringIO()
    with txmsg(BROKERS=APART):
        with pytest.raises(SystemExit):
            call_command("txmsg", "doctor", stdout=out)
        for command in (["relay"], ["consume"], ["txmsg", "run"]):
            with pytest.raises(CommandError, match="migrate --database other"):
                call_command(*command)

    assert "bad      writing to database 'other': no such table" in out.getvalue()


@committing
def test_a_relay_needs_the_tables_of_its_own_brokers_alone(
    without_a_table: None,
) -> None:
    with txmsg(BROKERS={**APART, "near": {"URL": "database://"}}):
        call_command("relay", "--once", "--broker", "near", verbosity=0)
