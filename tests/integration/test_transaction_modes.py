"""The transaction modes of a stage, step by step, and messages that are sent outside of
stages."""

from __future__ import annotations

import datetime as dt
import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction

from django_txmsg import Refuse, outbox_session, signals, wire
from django_txmsg.brokers.base import Delivery
from django_txmsg.brokers.database import DatabaseSession
from django_txmsg.consuming.consumer import wake_for_parked
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.stage_options import TRANSACTION_MODES, TransactionMode
from django_txmsg.errors import (
    BrokerUnavailable,
    DestinationUnavailable,
    DispatchUnknown,
    InvalidMessage,
    NewerCodeNeeded,
)
from django_txmsg.http_outbox.control_thread import ControlThread
from django_txmsg.models import Attempt, DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.models.fields import clock
from django_txmsg.models.queue import QueueMessage
from django_txmsg.runtime.breaker import Breaker
from django_txmsg.runtime.liveness import Activity
from django_txmsg.runtime.thread_group import ThreadGroup
from django_txmsg.sending.outbox import send_message, send_messages
from django_txmsg.testing.profiles import RABBITMQ
from django_txmsg.testing.scripted_broker import ScriptedBroker
from tests.app.models import Effect, Order
from tests.faults import wait_until
from tests.running import (
    Script,
    committing,
    declared,
    drained,
    put,
    send,
    ship,
    step,
    thread_of,
    txmsg,
)

pytestmark = committing


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    """Put the broker's tables into the second database, so that its transaction is
    separate."""
    with txmsg(BROKERS={"default": {"URL": "database://other?poll=0.01"}}):
        yield


def waiting(queue: str) -> int:
    return QueueMessage.objects.using("other").filter(queue=queue).count()


class Steps:
    """Records the order of the package's steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        for name in ("receive", "enlist", "ping", "commit", "ack", "rollback"):
            self._record(monkeypatch, DatabaseSession, name)
        for name in ("_commit", "_rollback"):
            self._record(monkeypatch, type(connections["default"]), name, f"db{name}")

    def _record(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, word: str = ""
    ) -> None:
        real = getattr(owner, name)

        def recorded(this: Any, *given: Any, **named: Any) -> Any:
            if owner is DatabaseSession or this.alias == "default":
                self.seen.append(word or name)
            return real(this, *given, **named)

        monkeypatch.setattr(owner, name, recorded)

    def __call__(self, what: str) -> None:
        self.seen.append(what)


@pytest.mark.parametrize("mode", TRANSACTION_MODES)
def test_an_expired_message_is_buried_at_its_first_delivery(
    mode: TransactionMode,
) -> None:
    def handler(message: Message) -> None:
        Effect.objects.create(name=str(message.body))

    with declared(handler, transaction=mode) as stage:
        for hours in (-1, 1):
            until = clock("default") + dt.timedelta(hours=hours)
            headers = {"txmsg-id": str(uuid.uuid4()), "content-type": wire.JSON}
            expires = {wire.EXPIRES: wire.format_instant(until)}
            put(stage.destination, b"%d" % hours, headers | expires)
        step(stage, times=2)
    assert DeadLetter.objects.get().reason == "expired"
    assert Effect.objects.get().name == "1"
    assert waiting(stage.destination) == 0


@pytest.mark.parametrize(
    ("mode", "order"),
    [
        ("outbox", ["receive", "handler", "db_commit", "ack"]),
        (
            "best_effort_1pc",
            ["receive", "handler", "enlist", "ping", "db_commit", "commit"],
        ),
        ("broker_only", ["receive", "handler", "enlist", "commit"]),
    ],
)
def test_each_mode_keeps_its_order_of_steps(
    mode: Any, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(message: Message) -> None:
        steps("handler")
        if mode != "broker_only":
            Effect.objects.create(name="done", message_id=str(message.id))
        send_message("tests.next", None)

    with declared(handler, transaction=mode) as stage:
        send(stage.destination)
        steps = Steps(monkeypatch)
        step(stage)
        monkeypatch.undo()
        assert waiting(stage.destination) == 0
    assert steps.seen == order
    if mode == "outbox":
        assert waiting("tests.next") == 0
        ship()
    assert waiting("tests.next") == 1


@pytest.mark.parametrize("mode", ["outbox", "best_effort_1pc", "broker_only"])
def test_a_raising_handler_sends_nothing_and_leaves_nothing(mode: Any) -> None:
    def handler(message: Message) -> None:
        send_message("tests.next", None)
        if mode != "broker_only":
            Effect.objects.create(name="done", message_id=str(message.id))
        raise ValueError

    with declared(handler, transaction=mode) as stage:
        send(stage.destination)
        step(stage, times=4)
        ship()
        assert waiting(stage.destination) == 0
    assert waiting("tests.next") == 0
    assert not Effect.objects.exists()
    assert DeadLetter.objects.count() == 1


@pytest.mark.parametrize("mode", TRANSACTION_MODES)
def test_an_attempt_that_needs_newer_code_sends_nothing(mode: TransactionMode) -> None:
    """The same session then commits the work of the next message. The handler is not
    called again at once."""
    called: list[Any] = []

    def handler(message: Message) -> None:
        called.append(message.body)
        send_message("tests.next", message.body)
        if message.body == "new":
            raise NewerCodeNeeded("tests.Newer", 2, 1)

    with declared(handler, transaction=mode) as stage:
        for body in ("new", "old"):
            send(stage.destination, body)
        step(stage, times=4)
        ship()
        assert waiting(stage.destination) == 0
    assert [json.loads(one.body) for one in drained("tests.next")] == ["old"]
    assert called == ["new", "old"]
    assert InboxMessage.objects.get(needs_version=2).attempts == 0


def test_broker_only_leaves_the_database_to_the_handler() -> None:
    def handler(message: Message) -> None:
        Effect.objects.create(name="plain", message_id=str(message.id))
        with transaction.atomic():
            Effect.objects.create(name="in a transaction", message_id=str(message.id))
            raise Refuse

    with declared(handler, transaction="broker_only") as stage:
        send(stage.destination)
        step(stage)
    assert Effect.objects.get().name == "plain"
    assert DeadLetter.objects.count() == 1


def test_a_broker_that_died_before_the_database_commit_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dead(session: DatabaseSession) -> None:
        raise BrokerUnavailable("gone")

    def handler(message: Message) -> None:
        Effect.objects.create(name="done", message_id=str(message.id))

    with declared(handler, transaction="best_effort_1pc") as stage:
        send(stage.destination)
        monkeypatch.setattr(DatabaseSession, "ping", dead)
        with pytest.raises(BrokerUnavailable):
            step(stage)
        monkeypatch.undo()
        assert not Effect.objects.exists()
        step(stage)
        assert waiting(stage.destination) == 0
    assert Effect.objects.count() == 1
    assert not Attempt.objects.exists()


@pytest.mark.parametrize("mode", ["best_effort_1pc", "broker_only"])
def test_delivery_is_due_at_once_after_the_broker_refused_its_commit(mode: Any) -> None:
    refused: list[str] = []

    def refuse(execute: Any, sql: str, *rest: Any) -> Any:
        if not refused and sql.startswith("INSERT") and "queuemessage" in sql:
            refused.append(sql)
            raise OperationalError("refused")
        return execute(sql, *rest)

    with declared(Script(), transaction=mode) as stage:
        send(stage.destination)
        with (
            connections["other"].execute_wrapper(refuse),
            pytest.raises(BrokerUnavailable),
        ):
            step(stage)
        assert refused
        step(stage)
        assert waiting(stage.destination) == 0
    assert waiting("tests.next") == 1


class LostCommit:
    """Makes the broker's commit fail once, as can happen in mode "best_effort_1pc"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = DatabaseSession.commit

        def commit(session: DatabaseSession, acks: list[Delivery]) -> None:
            monkeypatch.setattr(DatabaseSession, "commit", real)
            session.rollback()
            raise DispatchUnknown("the connection ended")

        monkeypatch.setattr(DatabaseSession, "commit", commit)


@pytest.mark.parametrize("hung_up", [False, True])
@pytest.mark.parametrize("parked", [False, True])
@pytest.mark.parametrize("mode", ["best_effort_1pc", "broker_only"])
def test_only_a_commit_on_which_the_broker_hangs_up_counts_as_an_attempt(
    mode: Any, parked: bool, hung_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker with an alarm delivers messages, but does not answer a commit."""

    def commit(session: DatabaseSession, acks: list[Delivery]) -> None:
        session.rollback()
        raise DispatchUnknown("no answer", hung_up=hung_up)

    script = Script(ValueError() if parked else None)
    with declared(script, transaction=mode) as stage:
        send(stage.destination)
        if parked:
            step(stage)
        with monkeypatch.context() as patch:
            patch.setattr(DatabaseSession, "commit", commit)
            for _ in range(8):
                with suppress(BrokerUnavailable):
                    step(stage)
                InboxMessage.objects.filter(lease_until__isnull=False).update(
                    lease_until=clock("default")
                )
        step(stage)
        assert waiting(stage.destination) == 0
    reasons = list(DeadLetter.objects.values_list("reason", flat=True))
    assert reasons == (["worker_lost"] if hung_up else [])
    assert waiting("tests.next") == (0 if hung_up else 1)
    if not hung_up:
        row = InboxMessage.objects.get()
        assert (row.attempts, len(script.attempts)) == (1 + parked, 9 + parked)


@pytest.mark.parametrize("parked", [False, True])
@pytest.mark.parametrize("mode", ["best_effort_1pc", "broker_only"])
def test_commit_that_the_brokers_database_refuses_counts_no_attempt(
    mode: Any, parked: bool
) -> None:
    """A migration locks the broker's tables for longer than `lock_timeout`, say."""

    def refuse(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("INSERT") and "queuemessage" in sql:
            raise OperationalError("refused")
        return execute(sql, *rest)

    script = Script(ValueError() if parked else None)
    with declared(script, transaction=mode) as stage:
        send(stage.destination)
        if parked:
            step(stage)
        with connections["other"].execute_wrapper(refuse):
            for _ in range(9):
                with pytest.raises(BrokerUnavailable):
                    step(stage)
        step(stage)
        assert waiting(stage.destination) == 0
    assert not DeadLetter.objects.exists()
    assert waiting("tests.next") == 1
    assert InboxMessage.objects.get().attempts == 1 + parked


@pytest.mark.postgresql
@pytest.mark.parametrize("mode", ["best_effort_1pc", "broker_only"])
def test_commit_that_ends_its_connection_counts_as_an_attempt(mode: Any) -> None:
    """The message may be the cause."""

    def end(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("INSERT") and "queuemessage" in sql:
            execute("SELECT pg_terminate_backend(pg_backend_pid())", None, *rest[1:])
        return execute(sql, *rest)

    here = {"default": {"URL": "database://?poll=0.01"}}
    with txmsg(BROKERS=here), declared(Script(), transaction=mode) as stage:
        send(stage.destination)
        with connections["default"].execute_wrapper(end):
            for _ in range(9):
                with suppress(BrokerUnavailable):
                    step(stage)
    assert DeadLetter.objects.get().reason == "worker_lost"


def test_broker_that_answers_no_commit_has_one_outage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A broker with a memory alarm delivers messages, but answers no commit. A message
    that it delivers, to the stage or to another user of the broker, does not end the
    outage."""
    caplog.set_level(logging.INFO)

    def lines(level: int) -> list[str]:
        found = [one for one in caplog.records if one.name == "django_txmsg.breaker"]
        return [one.getMessage() for one in found if one.levelno == level]

    controlled = threading.Event()

    def note(**_: object) -> None:
        controlled.set()

    signals.control_message_handled.connect(note)
    stop, shared = threading.Event(), Breaker("default", 0.2)
    group = ThreadGroup(stop.set)
    with (
        ScriptedBroker(RABBITMQ) as broker,
        txmsg(BROKERS={"default": {"URL": f"{broker.url}?send_timeout=0.3"}}),
        declared(
            lambda message: send_message("tests.next", None), transaction="broker_only"
        ) as stage,
    ):
        broker.on("COMMIT").park()
        heads = {wire.MESSAGE_ID: str(uuid.uuid4()), wire.CONTENT_TYPE: wire.JSON}
        broker.put(f"/queue/{stage.destination}", "null", heads)
        group.add("stage", thread_of(stage, stop, breaker=shared).run)
        group.add("control", ControlThread("default", stop, shared, Activity()).run)
        group.start()
        try:
            broker.wait_for("COMMIT", 2)
            broker.put(f"/queue/{wire.control_destination('tests')}", "unreadable", {})
            assert controlled.wait(30)
            broker.wait_for("COMMIT", 4)
            assert not lines(logging.INFO)
            broker.forget_rules()
            wait_until(lambda: lines(logging.INFO))
        finally:
            stop.set()
            group.join()
            signals.control_message_handled.disconnect(note)
    assert len(lines(logging.WARNING)) == len(lines(logging.INFO)) == 1


@pytest.mark.parametrize("parked", [False, True])
def test_stage_that_cannot_send_keeps_its_delivery_and_recovers(
    parked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is the same for a parked message, and ends when the message is
    processed."""

    def commit(session: DatabaseSession, acks: list[Delivery]) -> None:
        raise DestinationUnavailable("full")

    script = Script(ValueError() if parked else None)
    with declared(script, transaction="broker_only") as stage:
        thread = thread_of(stage)
        send(stage.destination)
        if parked:
            thread._step()
        session = thread._open()
        with monkeypatch.context() as patch:
            patch.setattr(DatabaseSession, "commit", commit)
            wake_for_parked([thread])
            thread._turn()
        assert isinstance(thread.refusal, DestinationUnavailable)
        handled, tries = thread.handled, len(script.attempts)
        thread._turn()
        assert len(script.attempts) == tries, "it waits"

        def processed() -> bool:
            wake_for_parked([thread])
            thread._turn()
            return thread.handled > handled

        wait_until(processed)
        assert thread.refusal is None
        assert thread._open() is session
        assert QueueMessage.objects.using("other").filter(queue="tests.next").exists()
        thread._close()


def client_decides_ids(message: Message) -> None:
    """A handler that inserts a row under a key that the client chose, so it cannot run
    twice."""
    Order.objects.create(number="from the client")
    send_message("tests.next", "ordered")


def test_1pc_with_ids_from_the_client_loses_the_outgoing_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second attempt collides with the row of the first, so the stage's message is
    never sent. The docs warn of this."""
    with declared(client_decides_ids, transaction="best_effort_1pc") as stage:
        send(stage.destination)
        LostCommit(monkeypatch)
        with pytest.raises(BrokerUnavailable):
            step(stage)
        step(stage, times=4)
        assert waiting(stage.destination) == 0
    assert Order.objects.count() == 1
    assert waiting("tests.next") == 0
    letter = DeadLetter.objects.get()
    assert "IntegrityError" in letter.exception
    assert letter.attempts == 3


def test_client_ids_in_mode_outbox_have_one_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The acknowledgement is lost, so the message is delivered twice. There is one row,
    one effect downstream, and no dead letter."""

    def lost(session: DatabaseSession, deliveries: list[Delivery]) -> None:
        raise BrokerUnavailable("the connection ended")

    got: list[Message] = []
    with (
        declared(client_decides_ids) as stage,
        declared(got.append, "tests.next") as downstream,
    ):
        send(stage.destination)
        monkeypatch.setattr(DatabaseSession, "ack", lost)
        with pytest.raises(BrokerUnavailable):
            step(stage)
        monkeypatch.undo()
        step(stage)
        assert waiting(stage.destination) == 0
        ship()
        step(downstream, times=2)
    assert Order.objects.count() == 1
    assert [one.body for one in got] == ["ordered"]
    assert not DeadLetter.objects.exists()
    assert InboxMessage.objects.get(stage=stage.name).deliveries == 2


@pytest.mark.parametrize("employed", [True, False])
def test_dangerous_window_is_measured_and_signalled(
    employed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[dict[str, Any]] = []

    def listen(**facts: Any) -> None:
        told.append(facts)

    def handler(message: Message) -> None:
        if employed:
            Effect.objects.create(name="done", message_id=str(message.id))

    signals.dangerous_window.connect(listen)
    try:
        with declared(handler, transaction="best_effort_1pc") as stage:
            send(stage.destination)
            LostCommit(monkeypatch)
            with pytest.raises(BrokerUnavailable):
                step(stage)
            step(stage)
    finally:
        signals.dangerous_window.disconnect(listen)
    assert [(one["failed"], one["employed"]) for one in told] == [
        (True, employed),
        (False, employed),
    ]
    assert all(one["seconds"] >= 0 for one in told)
    (record,) = [one for one in caplog.records if "broker's commit failed" in one.msg]
    assert record.levelno == (logging.ERROR if employed else logging.WARNING)


@pytest.mark.parametrize("mode", ["best_effort_1pc", "broker_only"])
def test_a_delay_inside_the_brokers_transaction_is_refused(mode: Any) -> None:
    refused: list[str] = []

    def handler(message: Message) -> None:
        with pytest.raises(InvalidMessage) as caught:
            send_messages(
                {"destination": "tests.next", "body": seconds}
                | {"delay": dt.timedelta(seconds=seconds)}
                for seconds in (0, 5)
            )
        refused.append(str(caught.value))

    with declared(handler, transaction=mode) as stage:
        send(stage.destination)
        step(stage)
    assert "delay" in refused[0]
    assert not drained("tests.next")


@txmsg(
    BROKERS={"default": {"URL": "database://"}, "second": {"URL": "database://other"}}
)
@pytest.mark.parametrize("own", ["default", "second"])
@pytest.mark.parametrize("mode", ["best_effort_1pc", "broker_only"])
def test_message_for_another_broker_is_refused_in_the_brokers_transaction(
    mode: Any, own: str
) -> None:
    """The stage's transaction belongs to its own broker, so a message for another
    broker cannot join it."""

    def handler(message: Message) -> None:
        for broker in ("default", "second"):
            with nullcontext() if broker == own else refused:
                send_message("tests.next", broker, broker=broker)

    refused = pytest.raises(InvalidMessage, match=f"Send it with broker='{own}'")
    with declared(handler, transaction=mode, broker=own) as stage:
        send(stage.destination, broker=own)
        step(stage)
    assert [json.loads(one.body) for one in drained("tests.next", own)] == [own]


@pytest.mark.parametrize("mode", ["best_effort_1pc", "broker_only"])
def test_an_inner_block_takes_back_no_message_of_the_brokers_transaction(
    mode: Any,
) -> None:
    def handler(message: Message) -> None:
        with suppress(ValueError), transaction.atomic():
            Effect.objects.create(name="inner")
            send_message("tests.next", None)
            raise ValueError

    with declared(handler, transaction=mode) as stage:
        send(stage.destination)
        step(stage)
    assert (Effect.objects.count(), waiting("tests.next")) == (0, 1)


def test_rolled_back_send_stores_nothing_and_the_next_leaves() -> None:
    with transaction.atomic():
        send_message("tests.next", None)
        transaction.set_rollback(True)
    assert not OutboxMessage.objects.exists()
    with transaction.atomic():
        send_message("tests.next", None)
    ship()
    assert waiting("tests.next") == 1


def test_another_alias_commits_on_its_own() -> None:
    """A handler writes to its stage's database alias and to another alias, and then
    fails. As documented, only the stage's own alias rolls back."""

    def handler(message: Message) -> None:
        Effect.objects.using("other").create(name="other", message_id=str(message.id))
        Effect.objects.create(name="own", message_id=str(message.id))
        if message.delivery_attempt == 1:
            raise ValueError

    with declared(handler) as stage:
        send(stage.destination)
        step(stage, times=2)
    assert Effect.objects.count() == 1
    assert Effect.objects.using("other").count() == 2


def committed_in_a_session() -> AbstractContextManager[object]:
    return outbox_session()


def committed_on_another_alias() -> AbstractContextManager[object]:
    return transaction.atomic(using="other")


@pytest.mark.parametrize("unique", [None, "k"])
@pytest.mark.parametrize(
    ("mode", "alias", "committed"),
    [
        ("none", "default", committed_in_a_session),
        ("broker_only", "default", committed_in_a_session),
        ("outbox", "other", committed_on_another_alias),
    ],
)
def test_an_attempt_that_skips_committed_work_loses_no_message(
    mode: Any,
    alias: str,
    committed: Callable[[], AbstractContextManager[object]],
    unique: str | None,
) -> None:
    """The first attempt commits a message in a separate transaction, and then fails.
    The later attempts skip that message, so their own message comes first instead of
    second. It still gets an id of its own, so it is stored, and it is stored once."""
    done: list[object] = []

    def work(name: str) -> None:
        with committed():
            sent = send_message("tests.next", name, using=alias, unique=unique and name)
        assert sent.body == name
        done.append(name)

    def handler(message: Message) -> None:
        if "first" not in done:
            work("first")
            raise ValueError
        work("second")
        if done.count("second") == 1:
            raise ValueError

    with declared(handler, transaction=mode) as stage:
        send(stage.destination)
        step(stage, times=3)
    assert done == ["first", "second", "second"]
    stored = (
        OutboxMessage.objects.using(alias)
        .filter(destination="tests.next")
        .order_by("pk")
    )
    bodies = [json.loads(bytes(one)) for one in stored.values_list("body", flat=True)]
    assert bodies == ["first", "second"]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("mode", "alias", "committed"),
    [
        ("none", "default", committed_in_a_session),
        ("broker_only", "default", committed_in_a_session),
        ("outbox", "other", committed_on_another_alias),
    ],
)
def test_no_message_gets_the_id_of_a_skipped_message(
    mode: Any,
    alias: str,
    committed: Callable[[], AbstractContextManager[object]],
    own: bool,
) -> None:
    """The first attempt commits a message separately from the stage's work. Pruning
    then deletes the message's row. The later attempts do not send that message, but
    another one. With `own`, the other message is sent together with the stage's work.
    Without `own`, the other message is committed separately."""
    ids: list[object] = []

    def handler(message: Message) -> None:
        name = {"tenant": "one" if not ids else "two"}
        if own and ids:
            ids.append(send_message("tests.next", None, headers=name).id)
        else:
            with committed():
                sent = send_message("tests.next", None, headers=name, using=alias)
            ids.append(sent.id)
        if len(ids) < 3:
            raise ValueError

    with declared(handler, transaction=mode) as stage:
        send(stage.destination)
        for _ in range(3):
            step(stage)
            OutboxMessage.objects.using(alias).all().delete()
    assert len(ids) == 3
    assert ids[0] != ids[1] == ids[2]


@txmsg(
    BROKERS={"default": {"URL": "database://"}, "second": {"URL": "database://other"}}
)
@pytest.mark.parametrize(
    "skipped", [{"broker": "second"}, {"message_id": uuid.UUID(int=1)}]
)
def test_an_attempt_that_skips_a_similar_message_sends_the_same_id(
    skipped: dict[str, Any],
) -> None:
    """The first attempt sends two messages. The later attempts skip the first message,
    and send only the second. The two messages differ in one thing: in one case, the
    first message goes to another broker; in the other case, the handler chose the id of
    the first message."""
    ids: list[object] = []

    def handler(message: Message) -> None:
        if not ids:
            with outbox_session():
                ids.append(send_message("tests.next", None, **skipped).id)
        with outbox_session():
            ids.append(send_message("tests.next", None).id)
        if len(ids) < 3:
            raise ValueError

    with declared(handler, transaction="none") as stage:
        send(stage.destination)
        step(stage, times=2)
    assert ids[0] != ids[1] == ids[2]


@pytest.mark.parametrize("undone", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("mode", "alias", "committed"),
    [
        ("none", "default", committed_in_a_session),
        ("none", "default", transaction.atomic),
        ("broker_only", "default", committed_in_a_session),
        ("outbox", "other", committed_on_another_alias),
    ],
)
def test_a_message_that_was_rolled_back_has_no_number(
    mode: Any,
    alias: str,
    committed: Callable[[], AbstractContextManager[object]],
    undone: tuple[bool, bool],
) -> None:
    """Each attempt commits two equal messages separately from the stage's work. In the
    attempts that `undone` names, a block with such a message is rolled back before."""
    ids: list[object] = []

    def handler(message: Message) -> None:
        if undone[len(ids) // 2]:
            with suppress(ValueError), committed():
                send_message("tests.next", None, using=alias)
                raise ValueError
        for _ in range(2):
            with committed():
                ids.append(send_message("tests.next", None, using=alias).id)
        if len(ids) == 2:
            raise ValueError

    with declared(handler, transaction=mode) as stage:
        send(stage.destination)
        step(stage, times=2)
    assert ids[:2] == ids[2:]
    assert OutboxMessage.objects.using(alias).filter(message_id__in=ids).count() == 2


def test_a_hook_that_sends_an_equal_message_loses_none() -> None:
    """Django calls the hook after the commit of the first message, but before the hook
    that was registered for that message."""

    def again() -> None:
        with transaction.atomic():
            send_message("tests.next", None)

    def handler(message: Message) -> None:
        with transaction.atomic():
            transaction.on_commit(again)
            send_message("tests.next", None)

    with declared(handler, transaction="none") as stage:
        send(stage.destination)
        step(stage)
    assert OutboxMessage.objects.filter(destination="tests.next").count() == 2


@pytest.mark.parametrize(("mode", "alias"), [("none", "default"), ("outbox", "other")])
def test_a_hook_that_fails_after_the_commit_loses_no_later_message(
    mode: Any, alias: str
) -> None:
    """Django then does not call the later hooks, although the first message is
    committed. The second message is equal, but does not get its id."""

    def fail() -> None:
        raise ValueError

    def handler(message: Message) -> None:
        for _ in range(2):
            with suppress(ValueError), transaction.atomic(using=alias):
                transaction.on_commit(fail, using=alias)
                send_message("tests.next", None, using=alias)

    with declared(handler, transaction=mode) as stage:
        send(stage.destination)
        step(stage)
    stored = OutboxMessage.objects.using(alias).filter(destination="tests.next")
    assert stored.count() == 2
