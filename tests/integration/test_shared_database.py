"""Two services in one database, each with its own broker under the same alias."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import transaction
from django.utils import timezone

from django_txmsg.dead_letters import bulk, burial, resolution
from django_txmsg.errors import DispatchRejected
from django_txmsg.models import BulkOperation, DeadLetter, OutboxMessage
from django_txmsg.models.dead_letter import Resolution
from django_txmsg.monitoring import alarms, status
from django_txmsg.sending.outbox import send_message
from tests.acceptance.crash_play import Manage
from tests.factories import DeadLetterFactory, WorkerFactory
from tests.faults import wait_until
from tests.running import committing, drained, ship, txmsg
from tests.services.stomp_server import StompServer

pytestmark = [committing]

NAMES = ("shop", "billing")


@pytest.fixture
def urls(activemq: StompServer, rabbitmq: StompServer) -> dict[str, str]:
    """The URL of each service's broker, which has the alias "default" in both
    services."""
    return {"shop": activemq.url(), "billing": rabbitmq.url()}


def settings(name: str, urls: dict[str, str], **more: Any) -> dict[str, Any]:
    return {
        "SERVICE": name,
        "BROKERS": {"default": {"URL": urls[name]}},
        "RELAY": {"BATCH_SIZE": 5, "POLL_INTERVAL": 0.05, "LEASE": 2.0, "LANES": 2},
        "DISPATCH_ON_COMMIT": "off",
        **more,
    }


def store(destination: str, name: str, count: int) -> None:
    """Store `count` messages. Every second one has a key that both services use."""
    with transaction.atomic():
        for number in range(count):
            key = "shared" if number % 2 else None
            send_message(destination, f"{name} {number}", key=key)


def pending(name: str) -> int:
    return OutboxMessage.objects.filter(
        service=name, dispatched_at=None, dead_at=None
    ).count()


def check_arrived(destination: str, urls: dict[str, str], count: int) -> None:
    """Check that each message is at the broker of its service, under that service's
    name."""
    for name in NAMES:
        with txmsg(**settings(name, urls)):
            found = drained(destination)
        bodies = {json.loads(one.body) for one in found}
        assert bodies == {f"{name} {number}" for number in range(count)}
        assert {one.headers["txmsg-service"] for one in found} == {name}


@pytest.mark.postgresql
def test_each_relay_sends_its_own_services_messages_also_after_kills(
    manage: Manage, urls: dict[str, str], destination: str
) -> None:
    count = 60
    for name in NAMES:
        with txmsg(**settings(name, urls)):
            store(destination, name, count)

    # One relay alone takes nothing of the other service.
    relay = manage("relay", txmsg=settings("shop", urls))
    wait_until(lambda: pending("shop") < count - 10, message=lambda: relay.output)
    relay.kill()
    relay = manage("relay", txmsg=settings("shop", urls))
    wait_until(lambda: pending("shop") == 0, message=lambda: relay.output)
    assert pending("billing") == count
    assert not OutboxMessage.objects.filter(service="billing", attempts__gt=0).exists()

    other = manage("relay", txmsg=settings("billing", urls))
    wait_until(lambda: pending("billing") < count - 10, message=lambda: other.output)
    other.kill()
    other = manage("relay", txmsg=settings("billing", urls))
    wait_until(lambda: pending("billing") == 0, message=lambda: other.output)
    check_arrived(destination, urls, count)


@pytest.mark.postgresql
def test_a_dispatcher_after_commit_sends_its_own_services_messages(
    urls: dict[str, str], destination: str
) -> None:
    with txmsg(**settings("billing", urls)):
        store(destination, "billing", 5)
    with txmsg(**settings("shop", urls, DISPATCH_ON_COMMIT="thread")):
        store(destination, "shop", 5)
        wait_until(lambda: pending("shop") == 0)
    assert pending("billing") == 5
    with txmsg(**settings("billing", urls)):
        assert ship() == 5
    check_arrived(destination, urls, 5)


@contextmanager
def service(name: str, **more: Any) -> Iterator[None]:
    with txmsg(SERVICE=name, DISPATCH_ON_COMMIT="off", **more):
        yield


def test_a_message_of_an_earlier_release_is_sent_by_any_relay() -> None:
    with service("shop"):
        store("tests.old", "old", 3)
        OutboxMessage.objects.update(service="")
    with service("billing"):
        assert ship() == 3
        assert [one.headers["txmsg-service"] for one in drained("tests.old")] == (
            ["billing"] * 3
        )


def test_a_message_waits_for_an_unnoted_one_of_its_key_and_for_no_other_service() -> (
    None
):
    later = dt.timedelta(minutes=5)
    with service("shop"), transaction.atomic():
        send_message("tests.k", 1, key="k", delay=later)
    with service("billing"), transaction.atomic():
        send_message("tests.k", 2, key="k")
    with service("billing"):
        assert ship() == 1
    OutboxMessage.objects.filter(service="shop").update(service="")
    with service("billing"), transaction.atomic():
        send_message("tests.k", 3, key="k")
    with service("billing"):
        assert ship() == 0


def test_a_renamed_service_sends_what_it_stored_under_its_former_name() -> None:
    with service("shop"):
        store("tests.renamed", "shop", 3)
    with service("store"):
        assert ship() == 0
    with service("store", FORMER_SERVICES=("shop",)):
        assert ship() == 3
        found = drained("tests.renamed")
    # Ids, and so the name that they are derived from, are of the old time.
    assert {one.headers["txmsg-service"] for one in found} == {"shop"}


def test_message_status_shows_the_messages_of_a_service_without_a_relay() -> None:
    WorkerFactory(kind="relay", service="shop", stages=[])
    for name in ("shop", "gone"):
        with service(name):
            store("tests.gone", name, 2)
    OutboxMessage.objects.update(due_at=timezone.now() - dt.timedelta(minutes=5))

    with service("shop"):
        said = [str(one) for one in alarms.of(status.read())]
        out = StringIO()
        with pytest.raises(SystemExit) as ended:
            call_command("message_status", stdout=out)
        assert ended.value.code == 1
    waits = "2 messages of service gone wait, and no relay of gone is running"
    assert any(one.startswith(waits) for one in said)
    assert "of service gone: 2 waiting, 2 of them overdue" in out.getvalue()
    assert waits in out.getvalue()

    with service("shop", FORMER_SERVICES=("gone",)):
        assert not any(
            "of service gone" in str(one) for one in alarms.of(status.read())
        )
    WorkerFactory(kind="relay", service="gone", stages=[])
    with service("shop"):
        assert not any(
            "of service gone" in str(one) for one in alarms.of(status.read())
        )


def test_a_redelivered_letter_of_the_relay_goes_to_the_service_that_stored_it() -> None:
    with service("shop"):
        store("tests.dead", "shop", 1)
        token = uuid.uuid4()
        (row,) = OutboxMessage.objects.claim(
            broker="default", token=token, lease=60, limit=9, services=["shop"]
        )
    with service("billing"), transaction.atomic():
        error = str(DispatchRejected("refused"))
        OutboxMessage.objects.mark_dead(row.id, token, error=error)
        burial.bury_outgoing(row, "default", "default", "rejected", error)
    letter = DeadLetter.objects.get()
    assert letter.headers["txmsg-service"] == "shop"
    with service("billing"), transaction.atomic():
        tally = resolution.Tally()
        resolution.redeliver(BulkOperation(), [letter], tally, "default")
    assert tally.done == 1
    again = OutboxMessage.objects.get(dispatched_at=None, dead_at=None)
    assert again.service == "shop"
    letter.refresh_from_db()
    assert letter.resolution == Resolution.REDELIVERED

    with service("billing"):
        DeadLetter.objects.update(resolution="open", resolved_at=None, deaths=2)
        letter.refresh_from_db()
        resolution.redeliver_copy(letter, headers={}, body=b"2")
    assert OutboxMessage.objects.get(body=b"2").service == "shop"


@pytest.mark.parametrize("kind", ["redeliver", "discard", "restore"])
def test_a_bulk_operation_is_executed_by_the_service_that_requested_it(
    kind: str,
) -> None:
    DeadLetterFactory(stage="mail.send", discarded=kind == "restore")
    with service("mail"):
        operation = bulk.start(kind, {"stage": "mail.send"})
    with service("shop"):
        assert bulk.work_batch("default") is None
        assert not bulk.running("default")
    assert not OutboxMessage.objects.exists()
    with service("post", FORMER_SERVICES=("mail",)):
        assert bulk.finish(operation).done == 1
    if kind == "redeliver":
        assert OutboxMessage.objects.get().service == "post"


def test_a_bulk_operation_of_an_earlier_release_is_executed_by_any_service() -> None:
    DeadLetterFactory()
    with service("mail"):
        operation = bulk.start("discard", {})
    BulkOperation.objects.update(filter={})
    with service("shop"):
        assert bulk.finish(operation).done == 1
