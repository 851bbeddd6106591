"""One claim loads a limited number of bytes into memory, not only a limited number of
rows."""

from __future__ import annotations

import gc
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction

from django_txmsg.brokers.base import Outgoing
from django_txmsg.brokers.database import DatabaseBroker, DatabaseSession
from django_txmsg.models import OutboxMessage, claiming
from django_txmsg.models.queue import QueueMessage
from django_txmsg.relaying.lane import Lane
from django_txmsg.relaying.limits import Budget, Turn
from django_txmsg.relaying.relay import Relay
from django_txmsg.sending.outbox import send_messages
from tests.running import committing, ship, txmsg

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


@pytest.fixture(autouse=True)
def budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the budget, so that the test's bodies can be small."""
    monkeypatch.setattr(claiming, "MAX_BYTES", 1000)


def store(*sizes: int, key: str | None = None) -> None:
    with transaction.atomic():
        send_messages(
            {"destination": "tests.q", "body": b"x" * size, "key": key}
            for size in sizes
        )


def sizes_claimed() -> list[int]:
    claimed = OutboxMessage.objects.claim(
        broker="default", token=uuid.uuid4(), lease=60, limit=100
    )
    return [len(row.body) for row in claimed]


def test_claim_is_limited_in_bytes_and_the_next_takes_the_rest() -> None:
    store(400, 500, 300, 100)
    assert sizes_claimed() == [400, 500]
    assert sizes_claimed() == [300, 100]


def test_a_larger_message_goes_alone() -> None:
    store(5000, 10, 10)
    assert sizes_claimed() == [5000]
    assert sizes_claimed() == [10, 10]


@pytest.mark.parametrize("key", [None, "order-1"])
def test_large_messages_leave_in_order(key: str | None) -> None:
    store(900, 900, 5000, 1, 2, 3000, 3, key=key)
    ship()
    rows = QueueMessage.objects.filter(queue="tests.q").order_by("id")
    assert [len(one.body) for one in rows] == [900, 900, 5000, 1, 2, 3000, 3]


class Counted(DatabaseBroker):
    """The embedded broker. It also measures how many bytes all sessions together are
    sending: `now` at this moment, and `most` at any moment so far."""

    lock, now, most = threading.Lock(), 0, 0

    def open(self, **options: Any) -> DatabaseSession:
        session = super().open(**options)
        send = session.send

        def counted(batch: Sequence[Outgoing], **more: Any) -> Any:
            size = sum(len(one.body) for one in batch)
            with Counted.lock:
                Counted.now += size
                Counted.most = max(Counted.most, Counted.now)
            threading.Event().wait(0.05)  # as a server far away
            try:
                return send(batch, **more)
            finally:
                with Counted.lock:
                    Counted.now -= size

        session.send = counted  # type: ignore[method-assign]  # counts the bytes
        return session


@pytest.mark.parametrize(
    ("sizes", "most"),
    [([900] * 16, 1000), ([200] * 40, 1000), ([5000, 100, 900, 3000] * 4, 5750)],
)
def test_lanes_hold_no_more_together_and_leave_nothing(
    sizes: list[int], most: int
) -> None:
    """All lanes share one budget. Together the lanes never send more bytes at a time
    than the budget allows, and they send every message."""
    Counted.most = 0
    with txmsg(BROKERS={"default": {"BACKEND": f"{__name__}.Counted"}}):
        store(*sizes)
        Relay(["default"], ["default"], lanes=4).run(once=True)
    assert not OutboxMessage.objects.filter(dispatched_at=None).exists()
    assert QueueMessage.objects.filter(queue="tests.q").count() == len(sizes)
    assert 0 < Counted.most <= most


def test_a_statement_that_copies_to_subscribers_is_limited_in_bytes() -> None:
    broker = DatabaseBroker("default", "database://?poll=0.01")
    names = ["a", "b", "c"]
    for name in names:
        with broker.open(subscriber=name) as session:
            session.subscribe("topic:tests.t", prefetch=1, subscriber=name)
    stored: list[int] = []
    in_memory: list[int] = []

    def copies() -> int:
        # isinstance() would evaluate lazy objects that other tests have left.
        return sum(type(one) is QueueMessage for one in gc.get_objects())

    def watch(execute: Any, sql: str, values: Any, *rest: Any) -> Any:
        if sql.startswith("INSERT"):
            in_memory.append(copies() - before)
            given = (getattr(one, "obj", one) for one in values)  # of psycopg.Binary
            bodies = [one for one in given if isinstance(one, bytes | memoryview)]
            stored.append(sum(map(len, bodies)))
        return execute(sql, values, *rest)

    before = copies()
    batch = [Outgoing("topic:tests.t", {}, b"x" * 300) for _ in range(4)]
    with broker.open() as session, connection.execute_wrapper(watch):
        assert session.send(batch) == [None] * 4

    assert QueueMessage.objects.count() == len(batch) * len(names)
    assert sum(stored) == 300 * len(batch) * len(names)
    assert max(stored) <= 1000
    assert max(in_memory) * 300 <= 1000


def test_prefetch_is_limited_in_bytes() -> None:
    QueueMessage.objects.bulk_create(
        QueueMessage(queue="tests.q", body=b"x" * size) for size in (600, 400, 1, 5000)
    )

    def claim() -> list[int]:
        room = claiming.Room(1000, claiming.UNLIMITED)
        rows = QueueMessage.objects.claim(
            "tests.q", uuid.uuid4(), limit=10, lease=60, room=room
        )
        return [len(body) for _, _, body, _ in rows]

    assert claim() == [600, 400]
    assert claim() == [1]
    assert claim() == [5000]


@pytest.fixture
def sessions() -> Iterator[Callable[[], DatabaseSession]]:
    """Return a function that opens a session on one queue, as each thread of a stage
    does."""
    claiming._claims.clear()  # sessions that another test has not closed
    broker = DatabaseBroker("default", "database://?poll=0.01")
    with ExitStack() as stack:

        def consuming() -> DatabaseSession:
            session = broker.open()
            stack.callback(session.close)
            session.subscribe("tests.q", prefetch=10)
            return session

        yield consuming


def queue(*sizes: int) -> None:
    rows = (QueueMessage(queue="tests.q", body=b"x" * size) for size in sizes)
    QueueMessage.objects.bulk_create(rows)


def test_the_sessions_of_a_process_hold_one_large_body_and_small_ones_go_on(
    sessions: Callable[[], DatabaseSession],
) -> None:
    one, other = sessions(), sessions()
    queue(900, 5000, 800, 100, 90)
    large = one.receive(0)
    assert large is not None
    assert len(large.body) == 900
    for size in (100, 90):
        small = other.receive(0)
        assert small is not None
        assert len(small.body) == size
        other.ack([small])
    assert other.receive(0) is None

    one.ack([large])
    for size in (5000, 800):
        found = other.receive(5)
        assert found is not None
        assert len(found.body) == size
        assert one.receive(0) is None
        other.ack([found])


def test_a_body_above_the_limit_is_claimed_although_there_are_always_others(
    sessions: Callable[[], DatabaseSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body above the limit is next in the queue, before a smaller body. Two sessions
    have held large bodies for longer than PATIENCE. While one of them still holds a
    large body, a third session claims neither of the two bodies in the queue. After
    that, the third session claims the body above the limit first."""
    first, second, third = sessions(), sessions(), sessions()
    queue(400, 400, 5000, 400)
    one, other = first.receive(0), second.receive(0)
    assert one is not None
    assert other is not None
    monkeypatch.setattr(claiming, "PATIENCE", 0.0)
    second.ack([other])
    assert third.receive(0) is None

    first.ack([one])
    found = third.receive(5)
    assert found is not None
    assert len(found.body) == 5000


def test_a_closed_session_gives_its_room_to_the_others(
    sessions: Callable[[], DatabaseSession],
) -> None:
    one, other = sessions(), sessions()
    queue(900, 900)
    assert one.receive(0) is not None
    assert other.receive(0) is None
    one.close()
    assert other.receive(5) is not None


def test_acknowledged_rows_are_deleted_in_groups_and_when_the_session_closes(
    sessions: Callable[[], DatabaseSession],
) -> None:
    """While a session has further claimed deliveries, it does not delete acknowledged
    rows one by one. It deletes them together, after its last claimed delivery or when
    it closes."""
    queue(*[1] * 6)
    session = sessions()
    session._pace = 0.001  # so that it claims all of them
    for _ in range(2):
        found = session.receive(0)
        assert found is not None
        session.ack([found])
    assert QueueMessage.objects.count() == 6
    session.close()
    assert QueueMessage.objects.count() == 4

    session = sessions()
    session._pace = 0.001
    for left in (4, 4, 4, 0):
        found = session.receive(0)
        assert found is not None
        assert not QueueMessage.objects.filter(lease_token=None).exists()
        session.ack([found])
        assert QueueMessage.objects.count() == left


def test_a_batch_holds_no_more_than_the_share_of_its_session(
    sessions: Callable[[], DatabaseSession],
) -> None:
    session, _ = sessions(), sessions()
    queue(200, 200, 200, 5000)
    batch = [session.receive(0) for _ in range(3)]
    assert [one and len(one.body) for one in batch] == [200, 200, None]
    session.ack(list(filter(None, batch)))
    assert [len(one.body) for one in [session.receive(5)] if one] == [200]


@pytest.mark.postgresql
def test_a_large_message_that_another_lane_looks_at_is_not_left_behind() -> None:
    """One lane locks a large row for a moment, but may not claim it. Meanwhile SKIP
    LOCKED hides the row from the lane that may claim it. So this second lane claims
    again."""
    store(5000)
    budget, looks = Budget(8), iter([True])

    class Turns(Turn):
        @contextmanager
        def at_database(self) -> Iterator[None]:
            with ExitStack() as stack, super().at_database():
                if next(looks, False):
                    look(stack)
                yield

    def look(stack: ExitStack) -> None:
        other = stack.enter_context(psycopg.connect(**parameters))
        other.execute("SELECT id FROM django_txmsg_outboxmessage FOR UPDATE")
        with budget.part(threading.Event()) as part:
            assert part is not None
            assert not part.larger
            budget.claimed(part, 0)

    wanted = ("host", "port", "user", "password", "dbname")
    given = connection.get_connection_params()
    parameters = {name: given[name] for name in wanted if name in given}
    lane = Lane("default", "default", turn=Turns(), budget=budget)
    try:
        assert lane.dispatch() == 1
    finally:
        lane.close()
