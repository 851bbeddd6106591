"""A broker closes the connection because of one message. That message becomes a dead
letter, and all others are sent. The outbox is relayed in each possible way."""

from __future__ import annotations

import contextlib
import gc
import select
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from django.core.management import call_command
from django.db import transaction
from django.db.models.functions import Now

from django_txmsg import tasks
from django_txmsg.brokers.amqp.session import AmqpSession
from django_txmsg.brokers.base import Delivery, Outgoing
from django_txmsg.brokers.database import DatabaseBroker, DatabaseSession
from django_txmsg.brokers.stomp import StompBroker
from django_txmsg.errors import (
    BrokerError,
    BrokerUnavailable,
    DestinationUnavailable,
    DispatchRejected,
)
from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.models.queue import QueueMessage
from django_txmsg.relaying.lane import Lane
from django_txmsg.relaying.limits import pauses
from django_txmsg.relaying.relay import Relay
from django_txmsg.sending.outbox import send_messages
from django_txmsg.testing import CLASSIC, RABBITMQ, ScriptedBroker
from tests.running import IMPATIENT, committing, declared, step, txmsg
from tests.services import ByAmqp

pytestmark = committing

ATTEMPTS = 3
Way = Callable[[], object]

#: Each call starts a new relay, as cron and Celery beat do.
WAYS: dict[str, Way] = {
    "relay --once": lambda: call_command("relay", "--once", verbosity=0),
    "the Celery task": lambda: tasks.relay_outbox(),
    "one lane": lambda: Relay(["default"], ["default"], lanes=1).run(once=True),
}


@pytest.fixture(params=WAYS)
def relay(request: pytest.FixtureRequest) -> Way:
    """Each way to relay once: the command, the Celery task, and a relay with one
    lane."""
    return WAYS[request.param]


@pytest.fixture
def scripted() -> Iterator[ScriptedBroker]:
    """A broker that ends the connection on each message to `tests.poison`."""
    with (
        ScriptedBroker(CLASSIC) as broker,
        txmsg(BROKERS={"default": {"URL": broker.url}}, RELAY=relaying()),
    ):
        broker.on("SEND", destination="/queue/tests.poison").cut()
        yield broker


def relaying() -> dict[str, Any]:
    return {**IMPATIENT["RELAY"], "MAX_ATTEMPTS": ATTEMPTS}


def store(*destinations: str, **more: Any) -> None:
    with transaction.atomic():
        send_messages(
            {"destination": one, "body": n, **more}
            for n, one in enumerate(destinations)
        )


def settle(relay: Way) -> None:
    """For each attempt of the poison message, make the message due and relay once."""
    for _ in range(ATTEMPTS):
        OutboxMessage.objects.filter(dispatched_at=None, dead_at=None).update(
            due_at=Now()
        )
        relay()


def states() -> Counter[str]:
    return Counter(row.state for row in OutboxMessage.objects.all())


def test_the_innocent_leave_at_once_and_the_poison_dies(
    scripted: ScriptedBroker, relay: Way
) -> None:
    store(*["tests.q"] * 15, "tests.poison", *["tests.q"] * 15)
    relay()
    assert states() == {"dispatched": 30, "pending": 1}
    poison = OutboxMessage.objects.get(dispatched_at=None)
    assert poison.attempts == 1

    settle(relay)
    assert states() == {"dispatched": 30, "dead": 1}
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("rejected", ATTEMPTS)


def test_a_message_that_failed_before_is_sent_apart_from_new_ones(
    scripted: ScriptedBroker,
) -> None:
    relay = WAYS["one lane"]
    store("tests.poison")
    relay()
    store(*["tests.q"] * 20)
    OutboxMessage.objects.update(due_at=Now())
    relay()
    assert states() == {"dispatched": 20, "pending": 1}
    assert len(scripted.stored("/queue/tests.q")) == 20, "nothing went twice"


def test_followers_of_a_poison_message_wait(
    scripted: ScriptedBroker,
) -> None:
    relay = WAYS["one lane"]
    store("tests.q", "tests.poison", "tests.q", "tests.q", key="order-1")
    store("tests.q", "tests.q", key="order-2")
    relay()
    stored = scripted.stored("/queue/tests.q")
    assert states() == {"dispatched": 3, "pending": 3}
    assert len({one.headers["txmsg-id"] for one in stored}) == 3

    settle(relay)
    assert states() == {"dispatched": 5, "dead": 1}
    of_one = [
        one.body
        for one in scripted.stored("/queue/tests.q")
        if one.headers["txmsg-key"] == "order-1"
    ]
    assert sorted(of_one) == of_one


def test_broker_outage_after_a_hang_up_counts_no_attempt_for_others(
    scripted: ScriptedBroker,
) -> None:
    scripted.on("SEND", destination="/queue/tests.end").call_with(
        lambda *_: scripted.stop()
    )
    store(*["tests.q"] * 3, "tests.end", *["tests.q"] * 3)
    counts = tasks.relay_outbox()
    assert "default" in counts["unavailable"]
    rows = OutboxMessage.objects.all()
    assert sum(row.attempts for row in rows) <= 1
    assert not rows.filter(lease_token__isnull=False).exists()


@pytest.mark.parametrize("way", ["one lane", "the Celery task"])
def test_rabbitmq_that_hangs_up_without_a_word_means_the_queue(way: str) -> None:
    """Over STOMP, RabbitMQ closes the connection without an error if a queue is full.
    The messages to this queue stay pending, and none of their attempts is counted. All
    others are sent."""
    with (
        ScriptedBroker(RABBITMQ) as broker,
        txmsg(BROKERS={"default": {"URL": broker.url}}, RELAY=relaying()),
    ):
        broker.on("SEND", destination="/queue/tests.full").cut()
        store(*["tests.q"] * 15, "tests.full", *["tests.q"] * 15, "tests.full")
        with contextlib.suppress(DestinationUnavailable):
            WAYS[way]()
        assert states() == {"dispatched": 30, "pending": 2}
        for _ in range(ATTEMPTS):
            pauses.clear()
            with contextlib.suppress(DestinationUnavailable):
                WAYS[way]()
        assert not OutboxMessage.objects.exclude(attempts=0).exists()
        broker.forget_rules()
        pauses.clear()
        WAYS[way]()
    assert states() == {"dispatched": 32}


class Quoting(DatabaseBroker):
    """The embedded broker. It refuses every message, with a text that no database can
    store, and its deliveries have no stable ids."""

    error: type[BrokerError] = DestinationUnavailable

    def open(self, **options: Any) -> DatabaseSession:
        session = super().open(**options)
        receive = session.receive

        def refused(batch: Sequence[Outgoing], **more: Any) -> Any:
            return [self.error("it has \x00 and \ud800") for _ in batch]

        def received(timeout: float) -> Delivery | None:
            found = receive(timeout)
            return found and replace(found, id_stays=False)

        session.send = refused  # type: ignore[method-assign]  # refuses all
        session.receive = received  # type: ignore[method-assign]  # with other ids
        return session


QUOTING = {"default": {"BACKEND": f"{__name__}.Quoting"}}
STORED = r"it has \x00 and \ud800"


@pytest.mark.parametrize("error", [DispatchRejected, DestinationUnavailable])
def test_refusal_with_unstorable_characters_is_recorded(
    error: type[BrokerError], monkeypatch: pytest.MonkeyPatch
) -> None:
    relay = WAYS["one lane"]
    monkeypatch.setattr(Quoting, "error", error)
    with txmsg(BROKERS=QUOTING, RELAY=relaying()):
        store("tests.q")
        with contextlib.suppress(DestinationUnavailable):
            relay()
        assert OutboxMessage.objects.get().last_error == STORED
        if error is DispatchRejected:
            settle(relay)
            assert states() == {"dead": 1}
            assert DeadLetter.objects.get().exception == STORED


def test_foreign_message_that_cannot_go_back_is_parked_with_the_refusal() -> None:
    with txmsg(BROKERS=QUOTING), declared(lambda message: None) as stage:
        QueueMessage.objects.create(queue=stage.destination, headers={}, body=b"1")
        step(stage)
    assert InboxMessage.objects.get().last_error == STORED


def test_broker_that_hangs_up_at_once_leaks_no_connection() -> None:
    with ScriptedBroker(RABBITMQ) as broker:
        broker.on("CONNECT").cut_after(answered=True)
        ends = 0
        while ends < 3:
            try:
                StompBroker("default", broker.url).open().close()
            except BrokerUnavailable:
                ends += 1
        # It warns of what was not closed, and a warning is an error here.
        gc.collect()


def test_connection_that_ended_while_idle_splits_no_batch(
    rabbitmq_amqp: ByAmqp, destination: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "django_txmsg.relay")
    with txmsg(BROKERS={"default": {"URL": rabbitmq_amqp.url()}}):
        lane = Lane("default", "default")
        try:
            store(*[destination] * 5)
            lane.dispatch()
            session = lane._session
            assert isinstance(session, AmqpSession)
            rabbitmq_amqp.close_all_connections()
            assert select.select([session._link.transport.sock], [], [], 30)[0]
            store(*[destination] * 5)
            lane.dispatch()
            assert lane._session is not session
        finally:
            lane.close()
    assert states() == {"dispatched": 10}
    assert "one by one" not in caplog.text


@pytest.mark.parametrize("headers", [[["a", "b"]], [1, 2], "text", 5, True])
@pytest.mark.parametrize("key", [None, "a"])
def test_headers_that_are_no_object_bury_only_their_message(
    relay: Way, headers: Any, key: str | None
) -> None:
    """Somebody has written the row by hand."""
    with txmsg(DISPATCH_ON_COMMIT="off"):
        store(*["tests.q"] * 3, key=key)
        _, second, _ = OutboxMessage.objects.order_by("id")
        OutboxMessage.objects.filter(pk=second.pk).update(headers=headers)
        relay()
    letter = DeadLetter.objects.get()
    assert letter.message_id == second.message_id
    assert letter.reason == "malformed_headers"
    assert bytes(letter.body) == bytes(second.body)
    assert states() == {"dispatched": 2, "dead": 1}
