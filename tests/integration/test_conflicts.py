"""Transactions that lose a conflict are repeated immediately, without counting an
attempt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone
from psycopg import IsolationLevel

from django_txmsg.consuming.consumer import wake_for_parked
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.models import Attempt, DeadLetter, InboxMessage
from tests.app.models import Effect, Order
from tests.faults import wait_until
from tests.integration.test_ordered import deliver, effect, effects, send_chain, taken
from tests.running import committing, declared, put, running, step, thread_of

pytestmark = [
    committing,
    pytest.mark.usefixtures("impatient"),
    pytest.mark.postgresql,  # SQLite's transactions run one after another
]

ONCE = RedeliveryPolicy(max_redeliveries=0, initial_delay=0.0)


@pytest.mark.parametrize("batch", [1, 5])
def test_contention_buries_no_message(batch: int) -> None:
    """Four threads update one row in serializable transactions. Each message may have
    only one attempt, and would succeed if no other message were processed meanwhile. No
    message is buried."""
    total = 20
    Order.objects.create(number="1", total=0)
    runs: list[int] = []

    def handler(message: Message) -> None:
        runs.append(message.delivery_attempt)
        order = Order.objects.get(number="1")
        Effect.objects.create(name="done", message_id=str(message.id))
        Order.objects.filter(number="1").update(total=order.total + 1)

    options = {"isolation": "serializable", "redelivery": ONCE, "batch": batch}
    with declared(handler, **options) as stage:
        for _ in range(total):
            put(stage.destination)
        with running(stage, concurrency=4):
            wait_until(
                lambda: (
                    not InboxMessage.objects.filter(processed_at=None).exists()
                    and InboxMessage.objects.count() == total
                ),
                deadline=45,
            )
    assert not DeadLetter.objects.exists()
    assert not Attempt.objects.exists()
    assert Order.objects.get().total == Effect.objects.count() == total
    assert set(runs) == {1}
    assert len(runs) > total, "nobody was in anybody's way"


def test_message_that_always_conflicts_ends_as_a_failed_attempt() -> None:
    """A handler's transaction loses a conflict each time. After ten repetitions, the
    attempt counts as failed."""
    runs: list[int] = []

    def handler(message: Message) -> None:
        runs.append(message.delivery_attempt)
        with connection.cursor() as cursor:
            cursor.execute(
                "DO $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END $$"
            )

    policy = RedeliveryPolicy(max_redeliveries=1, initial_delay=0.0)
    with declared(handler, redelivery=policy) as stage:
        put(stage.destination)
        step(stage, times=2)
    assert runs == [1] * 11 + [2] * 11
    assert DeadLetter.objects.get().attempts == 2


@contextmanager
def level_in_options(level: IsolationLevel | None) -> Iterator[None]:
    """Set the isolation level of new connections for the duration of the block."""
    options = connection.settings_dict["OPTIONS"]
    connection.close()
    if level is not None:
        options["isolation_level"] = level
    try:
        yield
    finally:
        options.pop("isolation_level", None)
        connection.close()


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(
    ("own", "option"),
    [
        ("repeatable read", None),
        ("serializable", None),
        (None, IsolationLevel.REPEATABLE_READ),
    ],
)
def test_follower_that_is_rechecked_meanwhile_buries_no_predecessor(
    own: str | None, option: IsolationLevel | None, batch: int
) -> None:
    """While a stage processes a message at a level above READ COMMITTED, the consumer
    postpones the message's follower. The message is processed at its first attempt, and
    releases the follower."""
    attempts: list[int] = []

    def handler(message: Message) -> None:
        effect(message)
        if message.body == 0:
            attempts.append(message.delivery_attempt)
            elsewhere.submit(recheck).result()

    def recheck() -> None:
        until = timezone.now() + timedelta(hours=1)
        try:
            InboxMessage.order.ask(stage.name, until, skips=False)
        finally:
            connection.close()

    options: Any = {"isolation": own, "batch": batch, "redelivery": ONCE}
    with (
        level_in_options(option),
        ThreadPoolExecutor(1) as elsewhere,
        declared(handler, ordered="block", **options) as stage,
    ):
        send_chain(stage.destination, [0, 1])
        zero, one = taken(stage.destination)
        deliver(stage.destination, one)
        step(stage)
        deliver(stage.destination, zero)
        send_chain(stage.destination, ["other"], key="other")
        with running(stage):
            wait_until(lambda: len(effects()) == 3, deadline=30)
    assert not DeadLetter.objects.exists()
    assert set(attempts) == {1}
    assert [one for one in effects() if one != "other"] == ["0", "1"]


def test_an_arrival_whose_second_half_fails_is_counted_once() -> None:
    """The count of the attempt is committed, but then the row cannot be locked. The
    message is processed without a second count."""
    with connection.cursor() as cursor:
        # A sequence remembers what its transaction does not.
        cursor.execute(
            "CREATE SEQUENCE refusals;"
            " CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " IF NEW.processed_at IS NOT NULL AND nextval('refusals') = 1 THEN"
            " RAISE EXCEPTION 'no lock in time' USING ERRCODE = '55P03'; END IF;"
            " RETURN NEW; END $$;"
            " CREATE TRIGGER refuse BEFORE UPDATE ON django_txmsg_inboxmessage"
            " FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
    try:
        with declared(lambda message: None, redelivery=ONCE) as stage:
            put(stage.destination)
            step(stage)
    finally:
        with connection.cursor() as cursor:
            cursor.execute(
                "DROP TRIGGER refuse ON django_txmsg_inboxmessage;"
                " DROP FUNCTION refuse(); DROP SEQUENCE refusals"
            )
    row = InboxMessage.objects.get()
    assert (row.state, row.deliveries, row.attempts) == ("processed", 1, 1)


def test_recording_a_failure_is_repeated_after_a_conflict() -> None:
    """The statement that records a failed attempt fails because of a conflict. Only
    this statement is repeated, not the handler. The parked message does not wait until
    its lease ends."""
    runs: list[int] = []

    def handler(message: Message) -> None:
        runs.append(message.delivery_attempt)
        raise ValueError

    with connection.cursor() as cursor:
        # The first try of each attempt loses; a sequence remembers it.
        cursor.execute(
            "CREATE SEQUENCE losses;"
            " CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " IF nextval('losses') % 2 = 1 THEN"
            " RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END IF;"
            " RETURN NEW; END $$;"
            " CREATE TRIGGER lose BEFORE INSERT ON django_txmsg_attempt"
            " FOR EACH ROW EXECUTE FUNCTION lose()"
        )
    try:
        policy = RedeliveryPolicy(max_redeliveries=1, initial_delay=0.0)
        with declared(handler, redelivery=policy) as stage:
            put(stage.destination)
            step(stage, times=2)
    finally:
        with connection.cursor() as cursor:
            cursor.execute(
                "DROP TRIGGER lose ON django_txmsg_attempt;"
                " DROP FUNCTION lose(); DROP SEQUENCE losses"
            )
    assert runs == [1, 2]
    assert Attempt.objects.count() == DeadLetter.objects.get().attempts == 2


@pytest.mark.parametrize("parked", [False, True])
def test_a_stop_between_two_tries_counts_none_and_keeps_no_lease(parked: bool) -> None:
    stop = threading.Event()
    runs: list[int] = []

    def handler(message: Message) -> None:
        runs.append(message.delivery_attempt)
        if parked and runs == [1]:
            raise ValueError
        if not stop.is_set():
            stop.set()
            with connection.cursor() as cursor:
                cursor.execute(
                    "DO $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END $$"
                )

    policy = RedeliveryPolicy(max_redeliveries=1, initial_delay=0.0)
    with declared(handler, redelivery=policy) as stage:
        put(stage.destination)
        if parked:
            step(stage)
        thread = thread_of(stage, stop)
        wake_for_parked([thread])
        thread._step()
        thread._close()
        row = InboxMessage.objects.get()
        assert (row.attempts, row.lease_token) == (int(parked), None)
        step(stage)
    assert runs == ([1, 2, 2] if parked else [1, 1])
    assert InboxMessage.objects.get().state == "processed"
