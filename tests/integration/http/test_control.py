"""The receiver of control messages finds out whether a session has committed, and acts
on the outcome."""

from __future__ import annotations

import datetime as dt
import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar

import pytest
from django.core import signing
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import override_settings
from django.utils import timezone

from django_txmsg import outbox_session, send_message, signals, wire
from django_txmsg.brokers import Broker, Session, get_broker
from django_txmsg.brokers.base import Delivery, Outgoing
from django_txmsg.brokers.database import DatabaseBroker, DatabaseSession
from django_txmsg.errors import BrokerUnavailable, CommitTimedOut
from django_txmsg.http_outbox import control_message, control_receive
from django_txmsg.models import DeadLetter, OutboxMessage, QueueMessage, SessionRecord
from django_txmsg.relaying.lane import Lane
from tests.app.models import Order
from tests.faults import wait_until

from .conftest import txmsg

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

on_postgresql = pytest.mark.postgresql


@pytest.fixture(autouse=True)
def settings_in_force() -> Iterator[None]:
    with override_settings(TXMSG=txmsg()):
        yield


@pytest.fixture
def arrivals() -> Iterator[DatabaseSession]:
    """A broker session that receives the control messages."""
    with get_broker().open() as session:
        session.subscribe("web.txmsg.control", prefetch=10)
        yield session


def dispatch(using: str, session_id: uuid.UUID) -> None:
    """Dispatch the rows of a session. The consumer passes such a function to the
    receiver."""
    lane = Lane(using, "default")
    while lane.dispatch(session_id=session_id):
        pass
    lane.close()


def handle(delivery: Delivery) -> None:
    """Check a control message once, as the receiver does."""
    control_receive.handle(delivery, dispatch, threading.Event())


def handle_to_the_end(delivery: Delivery) -> list[float]:
    """In another thread, check a control message until it is settled, as the receiver
    does. Return the pauses between the checks."""
    pauses: list[float] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                try:
                    return handle(delivery)
                except control_receive.LookAgain as again:
                    pauses.append(again.after)
                    threading.Event().wait(again.after)
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert not errors
    return pauses


def waits(limit: float, step: float) -> dict[str, object]:
    """Return settings for how long the receiver waits for a commit."""
    return txmsg(MAX_COMMIT_DURATION=limit, COMMIT_DELAY_INCREMENT=step)


def send_two() -> None:
    send_message("http.orders", {"part": "pay"})
    send_message("http.orders", {"part": "ship"})


def arrived() -> int:
    """Return how many of the session's two messages the broker has."""
    return QueueMessage.objects.using("other").filter(queue="http.orders").count()


def test_a_committed_session_is_dispatched(arrivals, heard) -> None:
    with outbox_session() as session:
        send_two()
    delivery = arrivals.receive(30)
    assert arrived() == 0

    handle(delivery)

    assert arrived() == 2
    assert not OutboxMessage.objects.filter(dispatched_at=None).exists()
    (handled,) = heard["handled"]
    assert handled["outcome"] == "dispatched"
    assert handled["session_id"] == session.id
    assert handled["attempts"] == 1
    assert 0 <= handled["transit_time"] < 60


def test_a_second_arrival_finds_nothing_to_do(arrivals, heard) -> None:
    with outbox_session():
        send_two()
    delivery = arrivals.receive(30)
    handle(delivery)
    handle(delivery)

    assert arrived() == 2
    assert heard["handled"][1]["outcome"] == "already_dispatched"


def test_metadata_reaches_the_receiver(arrivals, heard) -> None:
    with outbox_session() as session:
        session.metadata["tenant"] = "north"
        send_two()
    handle(arrivals.receive(30))

    assert heard["handled"][0]["headers"]["tenant"] == "north"


def test_rolled_back_session_sends_no_control_message(arrivals) -> None:
    with suppress(RuntimeError), outbox_session():
        send_two()
        raise RuntimeError
    assert arrivals.receive(0.3) is None
    assert not OutboxMessage.objects.exists()


def test_session_without_messages_sends_no_control_message(arrivals) -> None:
    with outbox_session():
        Order.objects.create(number="1")
    assert arrivals.receive(0.3) is None
    assert Order.objects.count() == 1


@on_postgresql
def test_a_session_in_progress_is_checked_often(arrivals, heard) -> None:
    pauses = []
    with transaction.atomic():
        with transaction.atomic(), outbox_session():
            send_two()
        # The session is over, and the transaction around it is not.
        delivery = arrivals.receive(30)
        for _ in range(8):
            with pytest.raises(control_receive.LookAgain) as again:
                _elsewhere(lambda: handle(delivery))
            pauses.append(again.value.after)
        assert arrived() == 0
    assert max(pauses) <= 0.2
    handle(delivery)
    assert arrived() == 2
    assert heard["handled"][-1]["attempts"] == 9


class ServerWithUsing(Broker):
    """A broker that runs as a server, but has an attribute `using` like the embedded
    broker. It keeps its messages in the database `other`, and the sessions use
    `default`."""

    def __init__(self, alias: str, url: str) -> None:
        super().__init__(alias, url)
        self.using = "default"
        self._inside = DatabaseBroker(alias, "database://other?poll=0.01")

    #: The connection of each thread that opened a session.
    used: ClassVar[list[BaseDatabaseWrapper]] = []

    def open(self, **options: Any) -> Session:
        self.used.append(connections["other"])
        return self._inside.open(**options)

    def shares_topics(self) -> bool:
        return True

    def unsubscribe(self, topic: str, subscriber: str) -> None:
        raise NotImplementedError

    def check(self) -> list[str]:
        return []


@on_postgresql
def test_a_broker_with_an_attribute_using_is_not_taken_for_embedded(heard) -> None:
    """The broker runs as a server, but has an attribute `using`. Before the session's
    commit, the receiver leaves the outcome open and schedules another check."""
    brokers = {"default": {"BACKEND": f"{__name__}.ServerWithUsing"}}
    with (
        override_settings(TXMSG={**txmsg(), "BROKERS": brokers}),
        get_broker().open() as arrivals,
    ):
        arrivals.subscribe("web.txmsg.control", prefetch=10)
        with transaction.atomic():
            with transaction.atomic(), outbox_session():
                send_two()
            delivery = arrivals.receive(30)
            with pytest.raises(control_receive.LookAgain):
                _elsewhere(lambda: handle(delivery))
            assert heard["handled"] == []
        handle_to_the_end(delivery)
    assert arrived() == 2
    others = [one for one in ServerWithUsing.used if one is not connections["other"]]
    assert others
    wait_until(lambda: all(one.connection is None for one in others))


@on_postgresql
def test_a_slow_commit_costs_little(arrivals) -> None:
    """The receiver gets the control message 50 ms before the commit, and settles it
    within a second after the commit."""
    took = []
    committed_at = []

    def consume(**_: object) -> None:
        delivery = arrivals.receive(30)

        def work() -> None:
            handle_to_the_end(delivery)
            took.append(time.monotonic())

        threads.append(threading.Thread(target=work))
        threads[0].start()
        threading.Event().wait(0.05)

    threads: list[threading.Thread] = []
    signals.control_message_sent.connect(consume)
    try:
        with outbox_session():
            send_two()
        committed_at.append(time.monotonic())
    finally:
        signals.control_message_sent.disconnect(consume)
    threads[0].join(30)
    assert arrived() == 2
    # 250 ms by the issue; a loaded machine is given some more.
    assert took[0] - committed_at[0] < 1.0


@on_postgresql
def test_a_rollback_after_the_control_message_ends_at_once(arrivals, heard) -> None:
    with suppress(RuntimeError), transaction.atomic():
        with outbox_session():
            send_two()
        raise RuntimeError
    handle(arrivals.receive(30))

    assert heard["handled"][0]["outcome"] == "rolled_back"
    assert heard["handled"][0]["attempts"] == 1
    assert not SessionRecord.objects.exists()
    assert not DeadLetter.objects.exists()


@on_postgresql
def test_rolling_back_a_savepoint_after_the_control_message_loses_nothing(
    arrivals, heard
) -> None:
    with transaction.atomic():
        with suppress(RuntimeError), transaction.atomic():
            with outbox_session():
                send_two()
            raise RuntimeError
        Order.objects.create(number="1")
    handle(arrivals.receive(30))

    assert heard["handled"][0]["outcome"] == "already_dispatched"
    assert arrived() == 0


@on_postgresql
def test_a_transaction_id_from_the_future_falls_back_to_waiting(
    arrivals, heard
) -> None:
    """A control message names a transaction id that the database has not reached. This
    happens on a promoted standby that never received the transaction. The receiver
    waits for a commit, and finally gives up."""
    session_id = uuid.uuid4()
    _forge(session_id, kind="transaction", transaction="99999999999")
    with override_settings(TXMSG=waits(0.3, 0.1)):
        pauses = handle_to_the_end(arrivals.receive(30))

    assert pauses[0] == pytest.approx(0.1)
    assert heard["handled"][0]["outcome"] == "given_up"


def test_without_a_commit_status_checks_become_rarer(arrivals, heard) -> None:
    session_id = uuid.uuid4()
    _forge(session_id)
    delivery = arrivals.receive(30)

    with override_settings(TXMSG=waits(3.0, 0.1)):
        pauses = handle_to_the_end(delivery)

    assert pauses[:3] == [pytest.approx(one) for one in (0.1, 0.2, 0.4)]
    assert sum(pauses) == pytest.approx(3.0, abs=1.5)
    record = SessionRecord.objects.get()
    assert (record.session_id, record.status) == (session_id, "tombstone")
    assert heard["handled"][0]["outcome"] == "given_up"
    assert not DeadLetter.objects.exists()
    # A copy of it ends quietly too.
    handle(delivery)
    assert SessionRecord.objects.count() == 1


def test_a_delayed_session_commits_and_leaves_a_record(arrivals, heard) -> None:
    with override_settings(TXMSG=txmsg(CONTROL_MESSAGE_ORACLE="delay")):
        with outbox_session() as session:
            send_two()
        delivery = arrivals.receive(30)
        assert delivery.headers["txmsg-oracle"] == "delay"
        assert SessionRecord.objects.get().session_id == session.id
        dispatch("default", session.id)
        handle(delivery)
    assert heard["handled"][0]["outcome"] == "already_dispatched"
    assert heard["handled"][0]["attempts"] == 1


@on_postgresql
def test_a_commit_after_the_tombstone_fails(arrivals, heard) -> None:
    """The receiver gives up a session whose control message has arrived and whose
    transaction is still open. Then the commit fails, and nothing is stored."""
    http = txmsg(
        CONTROL_MESSAGE_ORACLE="delay",
        MAX_COMMIT_DURATION=0.5,
        COMMIT_DELAY_INCREMENT=0.1,
    )

    def stand_still(**_: object) -> None:
        handle_to_the_end(arrivals.receive(30))

    signals.control_message_sent.connect(stand_still)
    try:
        with (  # noqa: PT012
            override_settings(TXMSG=http),
            pytest.raises(CommitTimedOut, match="MAX_COMMIT_DURATION"),
            outbox_session(),
        ):
            Order.objects.create(number="1")
            send_two()
    finally:
        signals.control_message_sent.disconnect(stand_still)

    assert heard["handled"][0]["outcome"] == "given_up"
    assert heard["ended"][0]["outcome"] == "failed"
    assert not Order.objects.exists()
    assert not OutboxMessage.objects.exists()
    assert SessionRecord.objects.get().status == "tombstone"
    assert arrived() == 0


@on_postgresql
def test_the_commit_wins_against_the_tombstone(arrivals, heard) -> None:
    """The session has written its row and has not committed, so the receiver cannot
    write a tombstone. The receiver checks repeatedly until the session's rows are
    visible."""
    http = txmsg(
        CONTROL_MESSAGE_ORACLE="delay",
        MAX_COMMIT_DURATION=0.1,
        COMMIT_DELAY_INCREMENT=0.05,
    )
    with override_settings(TXMSG=http), transaction.atomic():
        with outbox_session():
            send_two()
        delivery = arrivals.receive(30)
        ends = [time.monotonic() + 1.0]
        while time.monotonic() < ends[0]:
            with pytest.raises(control_receive.LookAgain) as again:
                _elsewhere(lambda: handle(delivery))
            threading.Event().wait(min(0.1, again.value.after))
    handle_to_the_end(delivery)

    assert arrived() == 2
    assert heard["handled"][0]["outcome"] == "dispatched"
    assert SessionRecord.objects.get().status == "committed"


def test_the_embedded_broker_tells_by_arriving() -> None:
    settings = txmsg() | {"BROKERS": {"default": {"URL": "database://?poll=0.01"}}}
    with override_settings(TXMSG=settings):
        with suppress(RuntimeError), transaction.atomic():
            with outbox_session():
                send_two()
            raise RuntimeError
        assert not QueueMessage.objects.exists()
        with outbox_session():
            send_two()
        with get_broker().open() as session:
            session.subscribe("web.txmsg.control", prefetch=1)
            delivery = session.receive(30)
            assert delivery.headers["txmsg-oracle"] == "arrival"
            handle(delivery)
        assert QueueMessage.objects.filter(queue="http.orders").count() == 2
        assert not SessionRecord.objects.exists()


def test_messages_claimed_elsewhere_are_waited_for(arrivals) -> None:
    with outbox_session() as session:
        send_two()
    manager = OutboxMessage.objects.db_manager("default")
    token = uuid.uuid4()
    claimed = manager.claim(
        broker="default", token=token, lease=1.0, limit=10, session_id=session.id
    )
    assert len(claimed) == 2
    delivery = arrivals.receive(30)
    with pytest.raises(control_receive.LookAgain) as again:
        handle(delivery)
    assert 0 < again.value.after <= 1.0
    # Whoever it was has died: the lease ends, and the control message does it.
    handle_to_the_end(delivery)
    assert arrived() == 2


def test_messages_that_are_not_due_are_left_to_the_relay(arrivals, heard) -> None:
    with outbox_session():
        send_message("http.orders", {}, delay=dt.timedelta(hours=1))
    handle(arrivals.receive(30))
    with outbox_session():
        send_message("http.orders", {"part": "pay"})
        send_message("http.orders", {}, delay=dt.timedelta(seconds=30))
    handle(arrivals.receive(30))

    outcomes = [one["outcome"] for one in heard["handled"]]
    assert outcomes == ["left_to_relay", "left_to_relay"]
    assert arrived() == 1


def test_a_broker_that_is_down_is_asked_again(arrivals, heard) -> None:
    with outbox_session():
        send_two()
    delivery = arrivals.receive(30)

    def down(using: str, session_id: uuid.UUID) -> None:
        raise BrokerUnavailable("down")

    with pytest.raises(control_receive.LookAgain):
        control_receive.handle(delivery, down, threading.Event())
    assert heard["handled"] == []
    handle(delivery)
    assert arrived() == 2


@pytest.mark.parametrize(
    "change",
    [
        {"txmsg-session": "nonsense"},
        {"txmsg-using": "nowhere"},
        {"txmsg-created": "yesterday"},
        {"txmsg-session": None},
        {"txmsg-id": "nonsense"},
        {"body": b"what is this?"},
    ],
)
@pytest.mark.parametrize("sign", [True, False])
def test_an_unreadable_control_message_is_dropped(
    arrivals, heard, caplog, change, sign
) -> None:
    _forge(uuid.uuid4(), sign=sign, **change)
    handle(arrivals.receive(30))

    assert heard["handled"][0]["outcome"] == "unreadable"
    assert "unreadable control message" in caplog.text
    assert not DeadLetter.objects.exists()


@pytest.mark.parametrize("name", ["txmsg-using", "txmsg-created", "txmsg-id"])
def test_a_control_message_of_any_size_is_logged_in_one_short_line(
    arrivals, caplog, name
) -> None:
    _forge(uuid.uuid4(), sign=False, **{name: "x" * 1_000_000})
    handle(arrivals.receive(30))

    assert "unreadable control message" in caplog.text
    assert len(caplog.text) < 1_000


def test_an_unsigned_message_with_the_id_of_another_does_not_end_its_checks(
    arrivals, heard
) -> None:
    session, message_id = uuid.uuid4(), str(uuid.uuid4())
    for signed in (True, False):
        _forge(
            session if signed else uuid.uuid4(), sign=signed, **{"txmsg-id": message_id}
        )
    genuine, forged = arrivals.receive(30), arrivals.receive(30)
    with pytest.raises(control_receive.LookAgain):
        handle(genuine)
    handle(forged)
    SessionRecord.objects.commit(session)
    handle(genuine)

    ended = [(one["outcome"], one["attempts"]) for one in heard["handled"]]
    assert ended == [("unsigned", 1), ("already_dispatched", 2)]


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"txmsg-signature": "AAAA", "txmsg-signed": '["txmsg-session"]'},
        {"txmsg-signed": "[" * 100_000},
        {"txmsg-signed": "7", "txmsg-signature": ""},
        {"txmsg-max-commit-duration": "0", "txmsg-commit-delay-increment": "0"},
        {"txmsg-max-commit-duration": "1e300", "txmsg-commit-delay-increment": "-1"},
        {"txmsg-max-commit-duration": "nan", "txmsg-commit-delay-increment": "nan"},
    ],
)
def test_nothing_is_given_up_on_a_stranger_s_word(
    arrivals, heard, caplog, facts
) -> None:
    _forge(uuid.uuid4(), sign=False, tenant="south", **facts)
    handle(arrivals.receive(30))

    (handled,) = heard["handled"]
    assert (handled["outcome"], handled["headers"]) == ("unsigned", {})
    assert "not signed" in caplog.text
    assert not SessionRecord.objects.exists()


def test_the_signature_covers_every_header(arrivals, heard) -> None:
    with outbox_session() as session:
        session.metadata["tenant"] = "north"
        send_two()
    row = QueueMessage.objects.using("other").get()
    dispatch("default", session.id)
    for name, value in {"tenant": "south", "txmsg-session": str(uuid.uuid4())}.items():
        changed = {**row.headers, name: value}
        with get_broker().open() as broker:
            broker.send([Outgoing("web.txmsg.control", changed, b"")])
    for _ in range(3):
        handle(arrivals.receive(30))
    outcomes = [one["outcome"] for one in heard["handled"]]
    assert outcomes == ["already_dispatched", "unsigned", "unsigned"]


def test_unsigned_control_message_only_sends_committed_messages(
    arrivals, heard
) -> None:
    """Earlier releases sent unsigned control messages. If the receiver gets such a
    message, it still dispatches the session's committed messages."""
    with outbox_session() as session:
        send_two()
    _forge(session.id, sign=False)
    arrivals.receive(30)
    handle(arrivals.receive(30))

    assert heard["handled"][0]["outcome"] == "dispatched"
    assert arrived() == 2


def test_a_key_that_was_rotated_is_honoured(arrivals, heard, settings) -> None:
    _forge(uuid.uuid4())
    delivery = arrivals.receive(30)
    settings.SECRET_KEY_FALLBACKS = [settings.SECRET_KEY]
    settings.SECRET_KEY = "a new one"
    with pytest.raises(control_receive.LookAgain):
        handle(delivery)
    settings.SECRET_KEY_FALLBACKS = []
    handle(delivery)
    assert heard["handled"][0]["outcome"] == "unsigned"


def test_control_message_expires_at_the_broker() -> None:
    message = control_message.ControlMessage("1", uuid.uuid4(), "default", "delay")
    left = message.outgoing().time_to_live
    assert left is not None
    assert 86_400 < left <= 86_415


def test_session_that_can_never_be_checked_is_left_to_the_relay(
    arrivals, heard, caplog, monkeypatch
) -> None:
    """Each check of the session fails, for example because its database lacks our
    tables. The receiver logs the error. Finally it drops the control message, and
    leaves the session's messages to the relay."""
    monkeypatch.setattr(control_receive, "PATIENCE", 0.5)

    def broken(using: str, session_id: uuid.UUID) -> None:
        raise LookupError("no such thing")

    with outbox_session() as session, override_settings(TXMSG=lease(1)):
        send_two()
    delivery = arrivals.receive(30)
    with override_settings(TXMSG=lease(1)):
        ends = time.monotonic() + 30
        while not heard["handled"] and time.monotonic() < ends:
            with suppress(control_receive.LookAgain):
                control_receive.handle(delivery, broken, threading.Event())
    assert heard["handled"][0]["outcome"] == "left_to_relay"
    assert heard["handled"][0]["session_id"] == session.id
    assert "no such thing" in caplog.text


def lease(seconds: float) -> dict[str, object]:
    """Return settings with a lease of `seconds`."""
    return {**txmsg(), "RELAY": {"LEASE": seconds}}


def _forge(session_id: uuid.UUID, *, sign: bool = True, **facts: object) -> None:
    """Send a control message of a session that does not exist. Without `sign`, the
    message looks like one of an earlier release."""
    body = facts.pop("body", b"")
    headers = {
        wire.MESSAGE_ID: str(uuid.uuid4()),
        wire.CREATED: wire.format_instant(timezone.now()),
        control_message.SESSION: str(session_id),
        control_message.USING: "default",
        control_message.ORACLE: facts.pop("kind", "delay"),
        control_message.TRANSACTION: facts.pop("transaction", ""),
        **facts,
    }
    headers = {name: value for name, value in headers.items() if value is not None}
    if sign:
        headers |= {
            control_message.SIGNED: json.dumps(sorted(headers)),
            control_message.SIGNATURE: signing.Signer(
                salt="django_txmsg.control"
            ).signature(json.dumps(headers, sort_keys=True)),
        }
    with get_broker().open() as session:
        session.send([Outgoing("web.txmsg.control", headers, body)])


def _elsewhere(work: object) -> None:
    """Run a function on another database connection, as in another process."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    if errors:
        raise errors[0]
