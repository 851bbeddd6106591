"""Real servers that refuse messages or do not answer: full queues, a revoked
permission, a memory alarm, a full disk.

A refusal does not count as an attempt of any message. While a server refuses messages
to one destination, messages to other destinations arrive. When it accepts messages
again, all of them arrive, and those with the same key arrive in order. With `make
soak`, each of these failures lasts TXMSG_SOAK_SECONDS (an hour, say).
"""

from __future__ import annotations

import io
import logging
import os
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import connections, transaction
from django.test import override_settings

from django_txmsg import stages, wire
from django_txmsg.brokers import get_broker
from django_txmsg.brokers.base import Outgoing
from django_txmsg.consuming.consumer import Consumer
from django_txmsg.envelope.redelivery import RedeliveryPolicy
from django_txmsg.errors import BrokerUnavailable
from django_txmsg.flows import batch, cancel, resume
from django_txmsg.flows.batches import Batches
from django_txmsg.models import DeadLetter, OutboxMessage, Run
from django_txmsg.models.run import WaitsFor
from django_txmsg.relaying.relay import Relay
from django_txmsg.runtime import breaker
from django_txmsg.sending.outbox import send_message, send_messages
from tests.faults import Proxy, wait_until
from tests.running import (
    IMPATIENT,
    at_work,
    committing,
    declared,
    drained,
    running,
    txmsg,
)
from tests.sampling import sample
from tests.services import ByAmqp, RabbitMQ, SilentActiveMQ, SmallActiveMQ
from tests.services.activemq import CRAMPED
from tests.services.stomp_server import PASSWORD
from tests.shelved_flows import at_hand
from tests.trips import Shop, begin, trips

pytestmark = committing

SOAK = float(os.environ.get("TXMSG_SOAK_SECONDS", "60"))
#: How long a state lasts: long enough for more trials than a message has attempts.
LONG = (pytest.mark.soak, pytest.mark.timeout(SOAK + 600))
LASTING = [pytest.param(0.0, id="short"), pytest.param(SOAK, marks=LONG)]
lasting = pytest.mark.parametrize("seconds", LASTING)
PAUSES = 0.5


@contextmanager
def relayed(url: str) -> Iterator[None]:
    """Run a relay that sends to a broker. With MAX_ATTEMPTS 2, a message with two
    counted attempts would be dead."""
    relay = {**IMPATIENT["RELAY"], "MAX_ATTEMPTS": 2, "BREAKER_MAX_PAUSE": PAUSES}
    with (
        txmsg(BROKERS={"default": {"URL": url}}, RELAY=relay),
        at_work(Relay(["default"], ["default"])),
    ):
        yield


def store(destination: str, numbers: range, **more: Any) -> None:
    with transaction.atomic():
        send_messages(
            {"destination": destination, "body": n, "key": f"{destination}/{n % 5}"}
            | more
            for n in numbers
        )


def pending(destination: str) -> int:
    rows = OutboxMessage.objects.filter(destination=destination, dispatched_at=None)
    return rows.count()


def outage(kind: str, words: str) -> None:
    """Wait until this process has recorded an outage whose error contains `words`."""

    def known() -> bool:
        return any(one.kind == kind and words in one.error for one in breaker.outages())

    wait_until(known, deadline=60, message=lambda: f"{breaker.outages()}")


def stays(tried: Callable[[], int], seconds: float) -> None:
    """Wait for at least four more refusals and for at least `seconds`."""
    end, begin = time.monotonic() + seconds, tried()
    wait_until(
        lambda: tried() >= begin + 4 and time.monotonic() > end,
        deadline=seconds + 90,
        interval=0.2,
    )


@pytest.fixture
def trials(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Callable[[], int]:
    """Return a function that counts the outages of this process.

    During a soak, the package's logging is switched off. Otherwise pytest would keep
    each log record with its exception, which contains the bodies of the tried messages.
    Within an hour, these records would fill the memory.
    """
    if request.node.get_closest_marker("soak"):
        caplog.set_level(logging.CRITICAL, "django_txmsg")
    met: list[float] = []
    failed = breaker.Breaker.failed

    def count(self: breaker.Breaker, *args: Any, **more: Any) -> None:
        if not self.remaining:
            met.append(time.monotonic())
        failed(self, *args, **more)

    monkeypatch.setattr(breaker.Breaker, "failed", count)
    return lambda: len(met)


def arrived(destination: str) -> list[int]:
    """Receive all messages. Return the numbers that their bodies contain, in order of
    first arrival and without duplicates."""
    found: dict[str, int] = {}
    for one in drained(destination):
        found.setdefault(one.headers["txmsg-id"], int(one.body))
    return list(found.values())


def in_order(destination: str, count: int) -> None:
    assert not DeadLetter.objects.exists()
    assert not OutboxMessage.objects.exclude(attempts=0).exists()
    by_key: dict[int, list[int]] = defaultdict(list)
    for number in arrived(destination):
        by_key[number % 5].append(number)
    assert sum(map(len, by_key.values())) == count
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


@pytest.fixture(params=[*sample(["amqp", "stomp"])])
def node(request: pytest.FixtureRequest, rabbitmq: RabbitMQ) -> RabbitMQ | ByAmqp:
    """A RabbitMQ node, over each protocol in turn."""
    return ByAmqp(rabbitmq) if request.param == "amqp" else rabbitmq


@lasting
def test_full_queue_of_rabbitmq_delays_only_its_own_messages(
    node: Any, destination: str, trials: Callable[[], int], seconds: float
) -> None:
    full, free = f"{destination}.full", f"{destination}.free"
    policy = uuid.uuid4().hex
    node.control(
        "set_policy", policy, f"^{full}$",
        '{"max-length": 3, "overflow": "reject-publish"}', "--apply-to", "queues",
    )  # fmt: skip
    with relayed(node.url()):
        store(full, range(60))
        outage("destination", "full")
        store(free, range(300))
        wait_until(lambda: not pending(free), deadline=60)
        stays(trials, seconds)
        assert pending(full) >= 50
        node.control("clear_policy", policy)
        wait_until(lambda: not pending(full), deadline=60)
        in_order(free, 300)
        in_order(full, 60)


@pytest.mark.parametrize("mode", [*sample(["broker_only", "best_effort_1pc"])])
def test_full_queue_keeps_the_messages_of_stages_that_send_to_it(
    node: Any, destination: str, mode: str
) -> None:
    """A stage sends into the broker's transaction, to a queue that is full. The stage's
    own message waits until the queue has room. Meanwhile no attempt is counted, and the
    message is not delivered again: RabbitMQ would drop it after the second delivery.
    Over STOMP, a refusal ends the connection of all threads: a message that arrives
    again before its attempt is subtracted has lost no worker."""
    full, policy = f"{destination}.full", uuid.uuid4().hex
    tries: list[int] = []
    for name, queue, limit in (
        (policy, full, '{"max-length": 1, "overflow": "reject-publish"}'),
        (destination, destination, '{"delivery-limit": 1}'),
    ):
        node.control("set_policy", name, f"^{queue}$", limit, "--apply-to", "queues")

    def forward(message: Any) -> None:
        tries.append(message.delivery_attempt)
        send_message(full, message.body)

    # A full quorum queue accepts the first message of each channel.
    classic = {"queue_type": "classic"} if isinstance(node, ByAmqp) else {}
    with (
        suppress(BrokerUnavailable),  # over STOMP, a refusal ends the connection
        get_broker_of(node.url(**classic)) as session,
    ):
        while session.send([Outgoing(full, {}, b"0")]) == [None]:
            pass
    with (
        txmsg(BROKERS={"default": {"URL": node.url()}}),
        declared(
            forward,
            destination,
            transaction=mode,
            redelivery=RedeliveryPolicy(max_redeliveries=0),
        ) as stage,
    ):
        with get_broker("default").open() as other:
            for number in range(20):
                head = {wire.MESSAGE_ID: str(uuid.uuid4())}
                body = str(number + 1).encode()
                assert other.send([Outgoing(destination, head, body)]) == [None]
        with running(stage, 4):
            wait_until(lambda: len(tries) >= 20, deadline=60)
            node.control("clear_policy", policy)
            bodies: set[bytes] = set()

            def came() -> bool:
                bodies.update(one.body for one in drained(full))
                return b"1" in bodies

            wait_until(came, deadline=60)
        assert not DeadLetter.objects.exists()
        assert set(tries) == {1}


@lasting
def test_forbidden_destination_waits_until_permission_is_back(
    node: Any, destination: str, trials: Callable[[], int], seconds: float
) -> None:
    user, topic = uuid.uuid4().hex, f"topic:{destination}.forbidden"
    forbidden, free = f"{destination}.forbidden", f"{destination}.free"
    some = f"^({free}.*|amq[.]default)$"
    node.control("add_user", user, PASSWORD)
    node.control("set_permissions", user, ".*", ".*", ".*")
    with relayed(node.url(user=user)):
        store(forbidden, range(20))
        wait_until(lambda: not pending(forbidden), deadline=60)
        node.control("set_permissions", user, some, some, some)
        node.close_all_connections()
        store(forbidden, range(20, 40))
        store(topic, range(3))
        outage("destination", "ACCESS_REFUSED")
        store(free, range(300))
        wait_until(lambda: not pending(free), deadline=60)
        stays(trials, seconds)
        node.control("set_permissions", user, ".*", ".*", ".*")
        wait_until(lambda: not pending(forbidden) + pending(topic), deadline=60)
        in_order(free, 300)
        in_order(forbidden, 40)


@lasting
def test_memory_alarm_of_rabbitmq_costs_no_attempt(
    rabbitmq: RabbitMQ, destination: str, trials: Callable[[], int], seconds: float
) -> None:
    rabbitmq.control("set_vm_memory_high_watermark", "absolute", "1MB")
    alarms = ("eval", "rabbit_alarm:get_alarms().")
    try:
        wait_until(lambda: "memory" in rabbitmq.control(*alarms), deadline=60)
        with relayed(ByAmqp(rabbitmq).url(send_timeout="1")):
            with transaction.atomic():
                big = send_message(destination, b"x" * 15_000_000, key="big")
            store(destination, range(20))
            outage("broker", "low on memory")
            stays(trials, seconds)
            out = io.StringIO()
            with pytest.raises(SystemExit):
                call_command("txmsg", "doctor", stdout=out)
            assert "Free memory or disk of the broker." in out.getvalue()
            row = OutboxMessage.objects.get(message_id=big.id)
            assert (row.attempts, row.dispatched_at) == (0, None)
            rabbitmq.control("set_vm_memory_high_watermark", "0.4")
            wait_until(lambda: not pending(destination), deadline=90)
            assert not DeadLetter.objects.exists()
            assert not OutboxMessage.objects.exclude(attempts=0).exists()
            ids = {one.headers["txmsg-id"] for one in drained(destination)}
            assert len(ids) == 21
    finally:
        rabbitmq.control("set_vm_memory_high_watermark", "0.4")


def test_a_queue_of_another_kind_slows_the_relay_down(
    rabbitmq: RabbitMQ, destination: str, trials: Callable[[], int]
) -> None:
    """AMQP has declared a quorum queue, and STOMP tries to declare a classic one. Each
    try costs a connection, so the relay pauses between tries."""
    with get_broker_of(ByAmqp(rabbitmq).url()) as session:
        session.subscribe(destination, prefetch=1)
    with Proxy(rabbitmq.port) as proxy:
        with relayed(rabbitmq.url(port=proxy.port)):
            store(destination, range(50))
            outage("destination", "inequivalent arg")
            before, began = proxy.accepted, time.monotonic()
            stays(trials, 3.0)
            rate = (proxy.accepted - before) / (time.monotonic() - began)
            # Two for each trial, and a pause of half a second between trials.
            assert rate <= 2 * 2 / PAUSES
        assert not OutboxMessage.objects.exclude(attempts=0).exists()
        with relayed(rabbitmq.url(port=proxy.port, existing="*")):
            wait_until(lambda: not pending(destination), deadline=60)
            in_order(destination, 50)


@contextmanager
def get_broker_of(url: str) -> Iterator[Any]:
    with txmsg(BROKERS={"default": {"URL": url}}), get_broker("default").open() as one:
        yield one


@lasting
def test_full_queue_of_activemq_delays_only_its_own_messages(
    small_activemq: SmallActiveMQ,
    destination: str,
    trials: Callable[[], int],
    seconds: float,
) -> None:
    full, free = f"{CRAMPED}{destination}", destination
    with relayed(small_activemq.url()):
        store(full, range(100), headers={"padding": "x" * 2000})
        outage("destination", "Memory Limit reached")
        store(free, range(300))
        wait_until(lambda: not pending(free), deadline=60)
        stays(trials, seconds)
        assert pending(full)
        taken: list[int] = []
        emptied = threading.Event()

        def consume() -> None:
            with get_broker("default").open() as session:
                session.subscribe(full, prefetch=5)
                while not emptied.is_set():
                    one = session.receive(0.2)
                    if one is not None:
                        taken.append(int(one.body))
                        session.ack([one])

        consumer = threading.Thread(target=consume)
        consumer.start()
        try:
            wait_until(lambda: len(taken) == 100, deadline=90)
        finally:
            emptied.set()
            consumer.join()
        in_order(free, 300)
    for key in range(5):
        assert [n for n in taken if n % 5 == key] == list(range(key, 100, 5))


@pytest.mark.timeout(900)  # a COMMIT is refused at random
def test_no_refused_transaction_keeps_a_queue_of_activemq_full(
    small_activemq: SmallActiveMQ, destination: str
) -> None:
    """ActiveMQ refuses a COMMIT after it has accepted some messages of the transaction.
    Until the connection ends, these messages fill the queue's memory. So the client
    ends the connection, and the queue accepts messages again."""
    full = f"{CRAMPED}{destination}"
    padding = {"txmsg-id": str(uuid.uuid4()), "padding": "x" * 2000}

    def fill() -> int:
        batch = [Outgoing(full, padding, b"null")] * 40
        return session.send(batch).count(None)

    def empty() -> None:
        with get_broker("default").open() as other:
            other.subscribe(full, prefetch=100)
            while (one := other.receive(2)) is not None:
                other.ack([one])

    with get_broker_of(small_activemq.url()) as session:
        room = fill()
        assert 0 < room < 40
        try:
            for _ in range(5000):  # about one COMMIT in a hundred is refused
                fill()
        except BrokerUnavailable:
            pass  # a refused COMMIT has ended it
        else:
            pytest.fail("no COMMIT was refused")

        def refilled() -> bool:
            nonlocal session
            empty()
            session = get_broker("default").open()
            with session:
                try:
                    return fill() == room
                except BrokerUnavailable:
                    return False  # this one's COMMIT was refused, too

        # The broker notices a moment later that a connection has ended.
        wait_until(refilled, deadline=120)


def test_a_full_store_pauses_its_destination(
    small_activemq: SmallActiveMQ, destination: str, trials: Callable[[], int]
) -> None:
    fill_the_store(small_activemq, destination, trials, "destination", "store is Full")


@pytest.mark.matrix
def test_a_full_store_that_gives_no_reason_pauses_the_broker(
    silent_activemq: SilentActiveMQ, destination: str, trials: Callable[[], int]
) -> None:
    fill_the_store(silent_activemq, destination, trials, "broker", "did not answer")


def fill_the_store(
    server: SmallActiveMQ,
    destination: str,
    trials: Callable[[], int],
    kind: str,
    words: str,
) -> None:
    with relayed(server.url(send_timeout="2")):
        store(destination, range(150), headers={"padding": "x" * 8000})
        store(
            destination,
            range(150, 240),
            headers={"padding": "x" * 8000, "more": "y" * 8000},
        )
        for n in range(240, 700):
            if any(
                one.kind == kind and words in one.error for one in breaker.outages()
            ):
                break
            store(destination, range(n, n + 1), headers={"padding": "x" * 8000})
            threading.Event().wait(0.02)
        outage(kind, words)
        stays(trials, 0.0)
        assert pending(destination)
        assert not OutboxMessage.objects.exclude(attempts=0).exists()
        count = OutboxMessage.objects.count()
        found: dict[int, None] = {}
        done = threading.Event()

        def consume() -> None:
            with get_broker("default").open() as session:
                session.subscribe(destination, prefetch=50)
                while not done.is_set():
                    one = session.receive(0.2)
                    if one is not None:
                        found.setdefault(int(one.body))
                        session.ack([one])

        consumer = threading.Thread(target=consume)
        consumer.start()
        try:
            wait_until(lambda: len(found) == count, deadline=120)
        finally:
            done.set()
            consumer.join()
    assert not DeadLetter.objects.exists()
    assert not OutboxMessage.objects.exclude(attempts=0).exists()
    for key in range(5):
        numbers = [n for n in found if n % 5 == key]
        assert numbers == sorted(numbers)


@contextmanager
def consumed(*names: str) -> Iterator[None]:
    """Run consumer threads of these stages until the end of the block."""
    consumer = Consumer(stages.find(names))

    def run() -> None:
        consumer.run()
        connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        consumer.stop()
        thread.join(30)


@pytest.mark.matrix
@lasting
def test_flows_batches_and_rates_wait_out_a_full_queue(
    rabbitmq: RabbitMQ, destination: str, trials: Callable[[], int], seconds: float
) -> None:
    """A flow's request is refused for as long as its queue is full. Everything else
    continues: other steps, a flow batch, a stage with a rate, and the undos of
    cancelled runs."""
    node, policy, ended = ByAmqp(rabbitmq), uuid.uuid4().hex, threading.Event()
    rated = declared(lambda message: None, f"{destination}.rated", rate="50/s")
    one = declared(lambda message: None, f"{destination}.one")
    over = declared(lambda message: ended.set(), f"{destination}.over")
    with (
        relayed(node.url()),
        override_settings(TXMSG={**settings.TXMSG, "FLOWS": {"BATCHES": True}}),
        trips(),
        at_hand(Batches),
        rated as slow,
        one as each,
        over as last,
    ):
        free = ["acts.trip", "acts.trip.steps", "acts.book", "acts.unbook"]
        free += [slow.name, each.name, last.name]
        free += [s.name for s in stages.all_stages() if "batches" in s.name]
        paying = consumed("acts.pay", "acts.unpay")
        with paying:
            pass  # its queue is there
        node.control(
            "set_policy", policy, "^acts[.]pay$",
            '{"max-length": 3, "overflow": "reject-publish"}', "--apply-to", "queues",
        )  # fmt: skip
        with consumed(*free):
            runs = [begin(f"A-{number}") for number in range(20)]
            outage("destination", "full")
            with transaction.atomic():
                send_messages(
                    {"destination": slow.destination, "body": n} for n in range(30)
                )
                batch(
                    [{"destination": each.destination, "body": 1}] * 30,
                    then=last.destination,
                )
            booked = Run.objects.filter(step="paid", waits_for=WaitsFor.ANSWER)
            wait_until(lambda: booked.count() == 20, deadline=60)
            assert ended.wait(60)
            wait_until(lambda: not pending(slow.destination), deadline=60)
            for run in booked[:5]:
                with transaction.atomic():
                    cancel(run, "meanwhile")
            stays(trials, seconds)
            node.control("clear_policy", policy)
            with consumed("acts.pay", "acts.unpay"):
                resumable = Run.objects.filter(waits_for=WaitsFor.RESUME)
                wait_until(lambda: resumable.count() == 15, deadline=90)
                for run in resumable:
                    assert run.turn is not None
                    with transaction.atomic():
                        resume(wire.ticket(run.run_id, run.turn), True)
                open_ = Run.objects.filter(ended_at=None)
                wait_until(lambda: not open_.exists(), deadline=90)
    # By STOMP they would be queues of another kind.
    for name in ("acts.pay", "acts.unpay", "tests.txmsg.control", *free):
        node.control("delete_queue", name)
    outcomes = Counter(Run.objects.filter(flow="acts.trip").values_list("outcome"))
    assert outcomes == {("answered",): 15, ("failed",): 5}, len(runs)
    assert not DeadLetter.objects.exists()
    assert not OutboxMessage.objects.exclude(attempts=0).exists()
    did = Counter(Shop.did)
    assert (did["book"], did["unbook"]) == (20, 5)
    assert did["pay"] - did["unpay"] == 15
