"""Redelivery and rejection with real brokers."""

from __future__ import annotations

import contextlib
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction

from django_txmsg import Redeliver, signals
from django_txmsg.brokers import get_broker
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.errors import BrokerUnavailable
from django_txmsg.models import Attempt, DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.relaying.lane import Lane
from django_txmsg.sending.outbox import send_messages
from tests.app.models import Effect
from tests.faults import Proxy, wait_until
from tests.running import (
    IMPATIENT,
    committing,
    declared,
    drained,
    put,
    running,
    send,
    ship,
    txmsg,
)
from tests.services.stomp_server import StompServer

# One database will do: what differs here is the broker.
pytestmark = [committing, pytest.mark.postgresql]

MODES = ["outbox", "best_effort_1pc"]
ODD = "a:b\nc\\d ü"


@pytest.fixture(
    autouse=True,
    params=[
        "activemq",
        pytest.param("rabbitmq", marks=pytest.mark.matrix),
        "rabbitmq_amqp",
    ],
)
def broker(request: pytest.FixtureRequest) -> Iterator[StompServer]:
    """Make each broker the default in turn."""
    server: StompServer = request.getfixturevalue(request.param)
    with txmsg(BROKERS={"default": {"URL": server.url()}}):
        yield server


def empty(destination: str) -> bool:
    with get_broker("default").open() as session:
        session.subscribe(destination, prefetch=1)
        return session.receive(0.5) is None


@pytest.mark.parametrize("transaction_mode", MODES)
@pytest.mark.parametrize("mode", ["non_blocking", "blocking", "broker"])
def test_failing_message_gets_as_many_attempts_as_its_policy_allows(
    transaction_mode: Any, mode: Any, destination: str
) -> None:
    """A message always fails. The handler gets the same message at each attempt, no
    matter where the message waited. After the last attempt, the message is buried."""
    got: list[Message] = []

    def handler(message: Message) -> None:
        got.append(message)
        raise ValueError

    policy = RedeliveryPolicy(initial_delay=0.05, max_delay=0.1, mode=mode)
    with declared(
        handler, destination, transaction=transaction_mode, redelivery=policy
    ) as stage:
        sent = send(destination, {"a": "ü:\n"}, headers={"odd": ODD}, key="k")
        with running(stage):
            wait_until(DeadLetter.objects.exists, deadline=60)
        assert empty(destination)
    assert [one.delivery_attempt for one in got] == [1, 2, 3, 4, 5, 6, 7]
    assert {one.id for one in got} == {sent.id}
    assert {(one.key, one.created_at) for one in got} == {("k", sent.created_at)}
    assert [one.body for one in got] == [{"a": "ü:\n"}] * 7
    assert len({frozenset(one.headers) for one in got}) == 1
    letter = DeadLetter.objects.get()
    assert letter.headers["odd"] == ODD
    assert "txmsg-failed-attempt" not in letter.headers
    assert bytes(letter.body) == '{"a":"ü:\\n"}'.encode()
    assert letter.attempts == Attempt.objects.count() == 7
    assert InboxMessage.objects.get().attempts == 7


@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "mode", ["broker", pytest.param("non_blocking", marks=pytest.mark.matrix)]
)
def test_many_failing_messages_each_keep_to_their_policy(
    mode: Any, count: int, destination: str
) -> None:
    runs: Counter[int] = Counter()

    def handler(message: Message) -> None:
        runs[message.body] += 1
        raise ValueError

    policy = RedeliveryPolicy(max_redeliveries=2, initial_delay=0.05, mode=mode)
    with declared(handler, destination, redelivery=policy) as stage:
        with transaction.atomic():
            send_messages({"destination": destination, "body": n} for n in range(count))
        ship()
        with running(stage):
            wait_until(lambda: DeadLetter.objects.count() == count, deadline=90)
        assert empty(destination)
    assert runs == dict.fromkeys(range(count), 3)
    assert not DeadLetter.objects.exclude(attempts=3, deaths=1).exists()


def test_delays_are_those_of_the_settings_or_of_the_stage(destination: str) -> None:
    """In each mode, a failed message waits for the delay of its stage's redelivery
    policy. If the stage has no policy, the message waits for the delay of the settings.
    A wait may be much longer than the delay, because the machine may be busy."""
    began: dict[str, list[float]] = {}
    told: dict[str, list[float]] = {}

    def handler(message: Message) -> None:
        began.setdefault(message.destination, []).append(time.monotonic())
        raise ValueError

    def listen(stage: str, delay: float, **facts: Any) -> None:
        told.setdefault(stage, []).append(delay)

    own = {"max_redeliveries": 3, "initial_delay": 0.3, "backoff": 1.0, "jitter": 0.0}
    policies = {
        f"{destination}.settings": None,
        f"{destination}.blocking": RedeliveryPolicy(**own, mode="blocking"),
        f"{destination}.broker": RedeliveryPolicy(**own, mode="broker"),
    }
    settings = {
        "MAX_REDELIVERIES": 3,
        "INITIAL_DELAY": 0.1,
        "BACKOFF": 3.0,
        "MAX_DELAY": 0.5,
        "JITTER": 0.2,
    }
    brokers = {"default": {"URL": get_broker()._url}}
    signals.message_redelivered.connect(listen)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(txmsg(BROKERS=brokers, REDELIVERY=settings))
            for name, policy in policies.items():
                put(name)
                stage = stack.enter_context(declared(handler, name, redelivery=policy))
                stack.enter_context(running(stage))
            wait_until(lambda: DeadLetter.objects.count() == 3, deadline=60)
    finally:
        signals.message_redelivered.disconnect(listen)
    for name, policy in policies.items():
        wanted = [0.1, 0.3, 0.5] if policy is None else [0.3, 0.3, 0.3]
        jitter = 0.2 if policy is None else 0.0
        for want, said in zip(wanted, told[name], strict=True):
            assert want * (1 - jitter) <= said <= want * (1 + jitter)
        pauses = [b - a for a, b in itertools.pairwise(began[name])]
        for said, pause in zip(told[name], pauses, strict=True):
            assert said - 0.01 < pause < 30


def test_a_foreign_message_keeps_its_identity_when_returned(
    destination: str,
) -> None:
    """A foreign message is returned to the broker, which gives each copy another id.
    The package's own id stays the same. Otherwise redeliveries would never end."""
    policy = RedeliveryPolicy(max_redeliveries=2, initial_delay=0.05, mode="broker")
    got: list[uuid.UUID] = []

    def handler(message: Message) -> None:
        got.append(message.id)
        raise ValueError

    with declared(handler, destination, redelivery=policy) as stage:
        put(destination, b"1", {"content-type": "application/json"})
        with running(stage):
            wait_until(DeadLetter.objects.exists, deadline=60)
        assert empty(destination)
    assert len(got) == 3
    assert set(got) == {DeadLetter.objects.get().message_id}


def test_the_broker_keeps_each_delay_and_lets_the_others_pass(
    destination: str,
) -> None:
    """A message with a long delay delays neither messages with a shorter delay nor
    messages that have not failed."""
    done: list[Message] = []

    def handler(message: Message) -> None:
        if message.delivery_attempt == 1 and message.body:
            raise Redeliver(after=message.body)
        done.append(message)

    policy = RedeliveryPolicy(mode="broker")
    with declared(handler, destination, redelivery=policy) as stage:
        for seconds in (3.0, 0.3, 0):
            send(destination, seconds)
        with running(stage):
            wait_until(lambda: len(done) == 3, deadline=60)
    assert [one.body for one in done] == [0, 0.3, 3.0]
    for one in done:
        row = InboxMessage.objects.get(message_id=one.id)
        assert (row.started_at - row.first_received_at).total_seconds() >= one.body


def test_heart_beats_flow_while_a_blocking_stage_waits(
    destination: str, broker: StompServer
) -> None:
    """A stage with mode "blocking" waits for the next attempt and sends heartbeats.
    Without them, the broker would close the connection, and deliver the message to
    another consumer."""

    def handler(message: Message) -> None:
        if message.delivery_attempt == 1:
            raise Redeliver(after=6.0)

    # Not less: a loaded machine stands still for more than a second.
    url = broker.url(heartbeat="2")
    policy = RedeliveryPolicy(mode="blocking")
    with (
        txmsg(BROKERS={"default": {"URL": url}}),
        declared(handler, destination, redelivery=policy) as stage,
        running(stage, concurrency=2),
    ):
        put(destination)
        rows = InboxMessage.objects.filter(processed_at__isnull=False)
        wait_until(rows.exists)
    assert empty(destination)
    row = InboxMessage.objects.get()
    assert (row.deliveries, row.attempts) == (1, 2)


@pytest.mark.parametrize("transaction_mode", MODES)
def test_cut_connection_during_a_handler_loses_nothing(
    transaction_mode: Any, destination: str, broker: StompServer
) -> None:
    """The connection is cut while a handler runs. The stage connects again, and the
    message has one effect."""
    with Proxy(broker.port) as proxy:
        url = broker.url(port=proxy.port)
        cuts: list[int] = []

        def handler(message: Message) -> None:
            Effect.objects.create(name="done", message_id=str(message.id))
            if not cuts:
                cuts.append(1)
                proxy.cut(reset=True)

        def came_again() -> bool:
            row = InboxMessage.objects.filter(stage=destination).first()
            # The outbox stage has recorded the first delivery too.
            again = 2 if transaction_mode == "outbox" else 1
            return (
                row is not None and row.deliveries == again and bool(row.processed_at)
            )

        with declared(handler, destination, transaction=transaction_mode) as stage:
            sent = send(destination)
            with txmsg(BROKERS={"default": {"URL": url}}), running(stage):
                wait_until(came_again, deadline=60)
            assert empty(destination)
    count = Effect.objects.filter(message_id=str(sent.id)).count()
    assert count == 1
    assert not DeadLetter.objects.exists()


def test_forbidden_destination_delays_no_other_message(
    destination: str, broker: StompServer
) -> None:
    """The relay's broker user may send only to destinations that begin with `allowed.`
    Messages to other destinations wait until a relay sends them as another user. The
    refused sends do not count as attempts."""
    good, bad = f"allowed.{destination}", destination
    limited = {"default": {"URL": broker.url(user="limited")}}
    relay = {**IMPATIENT["RELAY"], "MAX_ATTEMPTS": 2}
    with txmsg(BROKERS=limited, RELAY=relay):
        with transaction.atomic():
            send_messages(
                {"destination": good if n % 5 else bad, "body": n} for n in range(20)
            )

        lane = Lane("default", "default")
        waiting = OutboxMessage.objects.filter(dispatched_at=None)

        def tried() -> bool:
            # RabbitMQ hangs up on a bad message; sent one by one, it is found.
            with contextlib.suppress(BrokerUnavailable):
                lane.dispatch()
            return waiting.count() == 4 and time.monotonic() > end

        end = time.monotonic() + 2.0
        wait_until(tried, deadline=60)
        lane.close()
        assert set(waiting.values_list("attempts", flat=True)) == {0}
        assert any(
            bad in words for words in waiting.values_list("last_error", flat=True)
        )
    bodies = {int(delivery.body) for delivery in drained(good)}
    assert sorted(bodies) == [n for n in range(20) if n % 5]
    wait_until(lambda: ship() == 0 and not waiting.exists())
    assert {int(one.body) for one in drained(bad)} == {0, 5, 10, 15}
    assert not DeadLetter.objects.exists()
