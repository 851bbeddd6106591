"""Batches on brokers that run as a server. A failing message fails alone."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from typing import Any

import pytest
from django.db import connection, transaction

from django_txmsg import Refuse
from django_txmsg.brokers import get_broker
from django_txmsg.envelope.message import Message
from django_txmsg.models import Attempt, DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.runtime.thread_group import ThreadGroup
from django_txmsg.sending.outbox import send_message, send_messages
from tests.app.models import Effect
from tests.faults import Proxy, wait_until
from tests.running import (
    committing,
    declared,
    put,
    running,
    ship,
    thread_of,
    txmsg,
)

# One database will do: what differs here is the broker.
pytestmark = [committing, pytest.mark.postgresql]

SIZE = 50
FAILS, REFUSES = 7, 21


def cut_before(session: Any, proxy: Proxy) -> None:
    """Cut the connection after the commit and before any acknowledgement."""
    real = session.ack

    def ack(deliveries: Any) -> None:
        proxy.cut(reset=True)
        real(deliveries)

    session.ack = ack


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("broker", ["activemq", "rabbitmq"])
def test_each_failing_message_of_a_batch_rolls_back_alone(
    broker: str, cut: bool, destination: str, request: pytest.FixtureRequest
) -> None:
    """Each failing message rolls back alone. If the connection ends before the
    acknowledgement, the broker delivers all messages again, and the inbox drops those
    that were processed."""
    server: Any = request.getfixturevalue(broker)
    transactions: dict[int, set[int]] = defaultdict(set)
    onward = f"{destination}.next"

    def handler(message: Message) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT txid_current()")
            transactions[cursor.fetchone()[0]].add(message.body)
        Effect.objects.create(name=str(message.body), message_id=str(message.id))
        send_message(onward, message.body)
        if message.body == FAILS:
            raise ValueError
        if message.body == REFUSES:
            raise Refuse

    with (
        Proxy(server.port) as proxy,
        txmsg(BROKERS={"default": {"URL": server.url(port=proxy.port)}}),
        declared(handler, destination, batch=SIZE) as stage,
    ):
        with transaction.atomic():
            send_messages(
                {"destination": destination, "body": n} for n in range(SIZE - 1)
            )
        ship()
        broken = put(destination, b"{")
        stop = threading.Event()
        thread = thread_of(stage, stop)
        session: Any = thread._open()
        wait_until(lambda: session._consumer.buffered == SIZE)
        if cut:
            cut_before(session, proxy)
        group = ThreadGroup(stop.set)
        group.add("working", thread.run)
        group.start()
        try:
            # The other thread takes what is parked, and its share of what comes again.
            with running(stage):
                wait_until(lambda: DeadLetter.objects.count() == 3, deadline=60)
                seen = InboxMessage.objects.filter(deliveries=1 + cut)
                wait_until(lambda: seen.count() == SIZE - 1, deadline=60)
        finally:
            stop.set()
            group.join()
        with get_broker().open() as last:
            last.subscribe(destination, prefetch=1)
            assert last.receive(0.5) is None
    good = sorted({*range(SIZE - 1)} - {FAILS, REFUSES})
    assert max(transactions.values(), key=len) == set(range(SIZE - 1))
    names = Effect.objects.values_list("name", flat=True)
    assert Counter(map(int, names)) == Counter(good)
    sent = OutboxMessage.objects.filter(destination=onward)
    assert Counter(int(bytes(one.body)) for one in sent) == Counter(good)
    # The unreadable message is counted only when it is delivered again.
    assert InboxMessage.objects.filter(attempts=1).count() == SIZE - 2 + cut
    assert InboxMessage.objects.get(attempts=3).state == "dead"
    letters = {one.reason: one for one in DeadLetter.objects.all()}
    assert letters["attempts_exhausted"].attempts == 3
    assert bytes(letters["attempts_exhausted"].body) == str(FAILS).encode()
    assert letters["refused"].attempts == 1
    assert letters["undecodable_body"].message_id == broken
    numbers = Attempt.objects.order_by("number").values_list("number", flat=True)
    assert list(numbers) == [1, 1, 2, 3]
