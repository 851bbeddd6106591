"""The order of keys while something changes: a stage is renamed, transactions commit
late, another worker has locked a key, or foreign senders set order headers."""

from __future__ import annotations

import datetime as dt
import random
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.db.models.functions import Now
from django.utils import timezone

from django_txmsg import RedeliveryPolicy, message_type, wire
from django_txmsg.consuming import ordering
from django_txmsg.consuming.consumer import Consumer, wake_for_parked
from django_txmsg.dead_letters import bulk, burial, resolution
from django_txmsg.dead_letters.burial import bury_unread
from django_txmsg.envelope.failure import Failure
from django_txmsg.envelope.message import Message
from django_txmsg.envelope.stage_options import (
    TRANSACTION_MODES,
    Rate,
    TransactionMode,
)
from django_txmsg.models import (
    Attempt,
    DeadLetter,
    InboxMessage,
    OutboxMessage,
    RateLine,
    StageState,
    Worker,
    inbox_order,
)
from django_txmsg.models.bulk_operation import BulkKind
from django_txmsg.models.queue import QueueMessage
from django_txmsg.models.turn import Turn
from django_txmsg.monitoring import turns
from django_txmsg.sending import undoing
from django_txmsg.sending.outbox import send_message
from django_txmsg.stages import CallNext, Handler, Order, Stage
from tests.app.models import Effect
from tests.factories import WorkerFactory
from tests.faults import wait_until
from tests.integration.test_ordered import (
    deliver,
    due_now,
    effect,
    effects,
    redeliver,
    refusing,
    send_chain,
    settle,
    taken,
    waiting,
)
from tests.running import (
    committing,
    declared,
    put,
    running,
    ship,
    step,
    thread_of,
    txmsg,
)

pytestmark = [committing, pytest.mark.usefixtures("impatient")]


@message_type("tests.order_changes.Numbered")
@dataclass
class Numbered:
    number: int


def test_renamed_stage_waits_briefly_for_its_predecessors_record() -> None:
    """A renamed stage does not know which messages were processed under the old name.
    It waits only a short time for a predecessor that was processed under the old
    name."""
    destination, sent = "tests.renamed", 0

    def send(count: int) -> None:
        nonlocal sent
        for number in range(sent, sent + count):
            for key in "ab":
                send_chain(destination, [f"{key}{number:02}"], key=key)
        sent += count

    with txmsg(ORDER_PATIENCE=0.2):
        with declared(effect, destination, name="tests.old", ordered="block") as old:
            ordering.begin([old])
            send(6)
            step(old, times=7)
        with declared(effect, destination, name="tests.new", ordered="block") as new:
            ordering.begin([new])
            with running(new, concurrency=2):
                send(4)
                wait_until(lambda: Effect.objects.count() >= 20, deadline=60)
    for key in "ab":
        wanted = [f"{key}{number:02}" for number in range(10)]
        assert [one for one in effects() if one.startswith(key)] == wanted
    assert not InboxMessage.objects.filter(processed_at=None).exists()


@pytest.mark.parametrize("transaction", TRANSACTION_MODES)
@pytest.mark.parametrize("before", [None, "block"])
def test_no_message_is_stuck_while_ordered_is_deployed(
    before: Order | None, transaction: TransactionMode
) -> None:
    """Processes with the old and the new code run together. An ordered stage parks a
    message behind another one, and the stage that is not ordered processes the
    other."""
    with declared(effect, ordered="block") as ordered:
        plain = replace(ordered, ordered=None, transaction=transaction)
        ordering.begin([plain if before else ordered])
        send_chain(ordered.destination, [0, 1, 2, 3])
        _, *rest = taken(ordered.destination)
        deliver(ordered.destination, *rest)
        step(ordered, times=3)
        assert waiting(ordered) == 3
        first = InboxMessage.objects.earliest("after_at")
        InboxMessage.objects.filter(pk=first.pk).update(due_at=Now())
        step(plain)
        assert effects() == ["1"]
        settle(plain if before else ordered, 3)
    assert effects() == ["1", "2", "3"]


@pytest.mark.parametrize("brief", [False, True])
def test_followers_of_a_message_that_a_peer_processed_at_its_rate_are_released(
    *, brief: bool
) -> None:
    """A process with the old code processes a message that has waited at an ordered
    stage, and then for a slot. The process releases nothing. When it has ended, the
    ordered stage releases the messages behind that message. This is also so if the
    process was so brief that no consumer has read its row."""
    with declared(effect, ordered="block") as ordered:
        old = replace(ordered, ordered=None, rate=Rate.parse("1/h"))
        worker = WorkerFactory(stages=[ordered.name])
        consumer = Consumer([ordered])
        consumer._begin("default")
        consumer._look_after_process()
        send_chain(ordered.destination, [0, 1, 2, 3])
        _, *rest = taken(ordered.destination)
        deliver(ordered.destination, *rest)
        step(ordered, times=3)
        put(ordered.destination, b'"first slot"')
        step(old, parked=False)
        rows = InboxMessage.objects.order_by("after_at")
        claimed = rows.filter(pk=rows.filter(processed_at=None)[0].pk)
        claimed.update(due_at=Now())
        step(old)
        assert claimed.get().slot == 1
        RateLine.objects.update(origin=0)
        claimed.update(due_at=Now())
        step(old)
        assert effects() == ["first slot", "1"]
        step(ordered, times=2)
        assert effects() == ["first slot", "1"]
        if brief:
            ordering.end(old)
        else:
            worker.delete()
            consumer._look_at_beat = 0
            consumer._look_after_process()
            consumer._begin("default")
        settle(ordered, 4)
    assert effects()[1:] == ["1", "2", "3"]


def test_a_process_whose_stage_is_not_ordered_records_its_end() -> None:
    def handler(message: Message) -> None:
        StageState.objects.ordered(message.destination)  # as an ordered process does

    with declared(handler) as stage:
        put(stage.destination)
        Consumer([stage]).run(once=True)
        assert StageState.objects.get(stage=stage.name).ordered_since is None


def let_five_wait(stage: Stage) -> None:
    """Let five messages wait for a predecessor that does not arrive."""
    send_chain(stage.destination, [0, 1, 2, 3, 4, 5])
    _, *rest = taken(stage.destination)
    deliver(stage.destination, *rest)
    step(stage, times=5)


def test_a_process_beats_while_it_looks_for_stranded_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbox_order, "READ", 2)
    with declared(effect, ordered="block") as stage:
        let_five_wait(stage)
        rows = InboxMessage.objects.order_by("after_at")
        ended = rows.filter(pk=rows[3].pk)
        ended.update(processed_at=Now(), due_at=None, waits_for=None)
        consumer = Consumer([stage])
        consumer._begin("default")
        assert Worker.objects.filter(name=consumer._presence.name).exists()
    due = rows.filter(due_at__lte=Now() + dt.timedelta(days=1))
    assert [*due] == [rows[0], rows[4]]


def test_a_stage_that_is_not_ordered_any_more_releases_a_few_messages_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbox_order, "READ", 2)
    with declared(effect, ordered="block") as stage:
        let_five_wait(stage)
        waiting = InboxMessage.objects.filter(waits_for__isnull=False)
        left: list[int] = []
        ordering.begin(
            [replace(stage, ordered=None)], lambda: left.append(waiting.count())
        )
    assert left == [3, 1]
    assert not waiting.exists()
    assert InboxMessage.objects.filter(due_at__lte=Now()).count() == 5


@pytest.mark.postgresql
@pytest.mark.parametrize("options", [{"ordered": "block"}, {"rate": "1/h"}])
def test_a_consumer_starts_while_another_handles_what_an_old_one_has_parked(
    options: dict[str, Any],
) -> None:
    """An old consumer has parked a message. In the new code, the stage has no order and
    no rate. A process with the new code processes the message, and keeps its row
    locked. Another such process starts, and processes other messages."""
    inside, leave = threading.Event(), threading.Event()

    def handler(message: Message) -> None:
        if message.body == 1:
            inside.set()
            assert leave.wait(60)
        effect(message)

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            connections.close_all()

    with declared(handler, **options) as old:
        new = replace(old, ordered=None, rate=None)
        ordering.begin([old])
        send_chain(old.destination, [0, 1])
        zero, one = taken(old.destination)
        deliver(old.destination, *((one, zero) if old.ordered else (zero, one)))
        step(old)
        step(new if old.ordered else old, parked=False)
        assert effects() == ["0"]
        assert InboxMessage.objects.filter(due_at__isnull=False).update(due_at=Now())
        put(new.destination, b'"other"')
        consumer = Consumer([new])
        with ThreadPoolExecutor(2) as pool:
            slow = pool.submit(run, lambda: step(new))
            assert inside.wait(30)
            started = pool.submit(run, lambda: consumer.run(once=True))
            try:
                wait_until(lambda: effects() == ["0", "other"])
            finally:
                consumer.stop()
                leave.set()
            slow.result()
            started.result()
    assert effects() == ["0", "other", "1"]


@pytest.mark.postgresql
def test_late_commit_is_ordered_by_when_it_left() -> None:
    """A message is stored early, but committed and sent late, so its id is lower than
    those of messages sent before it. The stage processes the messages in the order in
    which they were sent."""
    destination = "tests.late"
    began, commit = threading.Event(), threading.Event()

    def late() -> None:
        try:
            with transaction.atomic():
                send_message(destination, "late", key="k")
                began.set()
                assert commit.wait(60)
        finally:
            connections.close_all()

    with (
        declared(effect, destination, ordered="block") as stage,
        ThreadPoolExecutor(1) as pool,
    ):
        send_chain(destination, ["first"])
        future = pool.submit(late)
        try:
            assert began.wait(60)
            send_chain(destination, ["second", "third"])
        finally:
            commit.set()
        future.result()
        send_chain(destination, ["last"])
        numbers = OutboxMessage.objects.order_by("linked_at", "id")
        assert list(numbers.values_list("id", flat=True)) != sorted(
            numbers.values_list("id", flat=True)
        )
        deliver(destination, *reversed(taken(destination)))
        settle(stage, 5)
    assert effects() == ["first", "second", "third", "late", "last"]


called: list[object] = []


def around(call_next: CallNext) -> Handler:
    """A stage middleware that records the messages for which it is called."""

    def middleware(message: Message) -> None:
        called.append(message.body)
        call_next(message)

    return middleware


around.outside_transaction = True  # type: ignore[attr-defined]

AROUND = {"STAGE_MIDDLEWARE": (f"{__name__}.around",)}


def test_a_middleware_around_the_transaction_sees_nothing_out_of_turn() -> None:
    called.clear()
    with txmsg(**AROUND), declared(effect, ordered="block") as stage:
        send_chain(stage.destination, [0, 1, 2])
        zero, one, two = taken(stage.destination)
        deliver(stage.destination, two, one)
        step(stage, times=2)
        assert (called, waiting(stage)) == ([], 2)
        deliver(stage.destination, zero)
        settle(stage, 3)
    assert called == [0, 1, 2]
    assert effects() == ["0", "1", "2"]
    assert not InboxMessage.objects.exclude(attempts=1).exists()


@pytest.mark.postgresql
@pytest.mark.parametrize("settings", [{}, AROUND])
def test_a_key_locked_elsewhere_costs_no_attempt(
    settings: dict[str, tuple[str]],
) -> None:
    with txmsg(**settings), declared(effect, ordered="block") as stage:
        send_chain(stage.destination, ["only"])
        lock = Turn(stage.name, "k", skips=False).lock
        with (
            closing(connections.create_connection("default")) as other,
            other.cursor() as cursor,
        ):
            cursor.execute("SELECT pg_advisory_lock(%s)", [lock])
            step(stage)
            assert effects() == []
            row = InboxMessage.objects.get()
            assert (row.attempts, row.due_at is None) == (0, False)
            cursor.execute("SELECT pg_advisory_unlock(%s)", [lock])
        InboxMessage.objects.update(due_at=Now())
        settle(stage, 1)
    assert effects() == ["only"]
    assert InboxMessage.objects.get().attempts == 1


STRANGE = [
    "", ";", ";at=", "x;at=2026-01-01T00:00:00Z", "{0}", "{0};at=", "{0};at=2026",
    "{0};at=2026-01-01T00:00:00", "{0};at=2026-01-01T00:00:00Z",
    "{0};at=2020-01-01T00:00:00Z", "{0};at=0002-01-01T00:00:00+14:00",
    "{0};at=9998-12-31T23:59:59-14:00", "{0};at=9999-12-31T23:59:59Z",
    "{{{0}}};at=2026-01-01T00:00:00Z", "urn:uuid:{0};at=2026-01-01T00:00:00Z;at=1",
    "{0};at=\uff12\uff10\uff12\uff16-01-01T00:00:00Z", "{0};at=" + "7" * 5000,
]  # fmt: skip


@pytest.mark.parametrize(("ordered", "batch"), [("block", 7), ("skip", 1)])
def test_forged_links_block_no_key_and_no_stage(ordered: Order, batch: int) -> None:
    """Forged messages name other messages or themselves as predecessors, even in
    circles, and use the keys of others. All genuine messages are processed. Forged
    messages that stay blocked can be released."""
    draw = random.Random(f"{ordered} {batch}")
    ids = [uuid.UUID(int=draw.getrandbits(128)) for _ in range(30)]
    with declared(effect, ordered=ordered, batch=batch) as stage:
        for key in "ab":
            send_chain(stage.destination, [f"{key}{n}" for n in range(8)], key=key)
        found = taken(stage.destination)
        for own in ids:
            after = draw.choice(STRANGE).format(draw.choice([own, *ids, uuid.uuid4()]))
            headers = {
                "txmsg-id": str(own),
                "content-type": draw.choice(["application/json", "nonsense"]),
                "txmsg-key": draw.choice(
                    ["a", "b", "", " ", "a" * 300, "c\x7fключ 😀"]
                ),
                "txmsg-after": after,
            }
            found.insert(draw.randrange(len(found)), (b'"x"', headers))
        deliver(stage.destination, *found)
        with running(stage, concurrency=2):
            wait_until(lambda: len(genuine()) == 16, deadline=60)
            wait_until(lambda: not unseen(stage.destination), deadline=60)

            def let_go() -> bool:
                rows = InboxMessage.objects
                open_ones = rows.filter(processed_at=None, dead_at=None)
                keys = open_ones.values_list("key", flat=True)
                for key in set(keys.filter(waits_for__isnull=False)):
                    InboxMessage.order.let_go(stage.name, key, link="txmsg-after")
                for letter in DeadLetter.objects.filter(resolution="open"):
                    finish(BulkKind.DISCARD, letter)
                return not open_ones.exists()

            wait_until(let_go, deadline=60)
    for key in "ab":
        assert [one for one in genuine() if one[0] == key] == [
            f"{key}{n}" for n in range(8)
        ]
    ids_done = Effect.objects.values_list("message_id", flat=True)
    assert len(set(ids_done)) == len(ids_done)
    dead = DeadLetter.objects.exclude(message_id=None).count()
    assert len(ids_done) + dead == 16 + len(ids)


def test_burying_an_unread_message_releases_followers_with_skip() -> None:
    with declared(effect, ordered="skip") as stage:
        sent = send_chain(stage.destination, [0, 1, 2])
        _, one, two = taken(stage.destination)
        deliver(stage.destination, one, two)
        step(stage, times=2)
        newer = InboxMessage.objects.filter(message_id=sent[1].id)
        newer.update(needs_type="tests.type", needs_version=2)
        with txmsg(ORDER_PATIENCE=0.0):
            assert bury_unread("default", stage.name) == 1
        assert InboxMessage.order.waiting(stage.name, None) == (0, 0)
        settle(stage, 1)
    assert effects() == ["2"]


@pytest.mark.parametrize("reason", ["rejected", "broker"])
def test_copy_of_a_message_that_the_broker_gave_up_keeps_its_place(reason: str) -> None:
    with declared(effect, ordered="block") as stage:
        sent = send_chain(stage.destination, [0, 1, 2])
        zero, one, two = taken(stage.destination)
        deliver(stage.destination, zero, two)
        step(stage, times=2)
        with transaction.atomic():
            letter = burial.bury(
                using="default", message_id=sent[1].id, stage="", broker="default",
                destination=stage.destination, headers=one[1], body=one[0],
                reason=reason, failure=Failure.because(reason, "no"), attempts=7,
            )  # fmt: skip
        assert "If you discard it, they keep waiting" in turns.note(letter)
        copy = resolution.redeliver_copy(letter, headers={}, body=b'"edited"')
        ship()
        settle(stage, 3)
    assert effects() == ["0", "edited", "2"]
    assert copy == letter.message_id
    letter.refresh_from_db()
    assert (letter.resolution, letter.replaced_by) == ("redelivered", None)
    assert turns.note(letter) == ""


def failing_once(*bodies: object) -> Handler:
    def handler(message: Message) -> None:
        if message.body in bodies and message.delivery_attempt == 1:
            raise ValueError(message.body)
        effect(message)

    return handler


def revoke(stage: Stage, message_id: uuid.UUID) -> None:
    """Revoke a request, as its undo does."""
    undone = wire.Undone(message_id, timezone.now(), answered=False)
    with transaction.atomic():
        assert not undoing.was_done(undone, stage.name, stage.destination, "default")


LATER = RedeliveryPolicy(initial_delay=3600.0, max_delay=7200.0)
REQUEST = {wire.TICKET: "ticket", wire.REPLY_TO: "tests.steps"}


@pytest.mark.parametrize("ordered", ["block", "skip"])
@pytest.mark.parametrize("late", [False, True])
def test_followers_of_a_revoked_request_do_not_overtake_its_predecessor(
    ordered: Order, late: bool
) -> None:
    with declared(failing_once(0), ordered=ordered, redelivery=LATER) as stage:
        sent = send_chain(stage.destination, [0, 1, 2])
        zero, (body, headers), two = taken(stage.destination)
        deliver(stage.destination, zero, (body, headers | REQUEST))
        step(stage, times=2)
        if late:
            revoke(stage, sent[1].id)
        deliver(stage.destination, two)
        step(stage)
        if not late:
            revoke(stage, sent[1].id)
        assert effects() == []
        InboxMessage.objects.filter(message_id=sent[0].id).update(due_at=Now())
        settle(stage, 2)
        rows = InboxMessage.objects.filter(message_id=sent[1].id)
        wait_until(rows.exclude(dead_at=None).exclude(revoked_at=None).exists)
    assert effects() == ["0", "2"]
    assert not DeadLetter.objects.exists()


def test_follower_runs_when_a_request_is_revoked_between_two_attempts() -> None:
    with declared(failing_once(1), ordered="block", redelivery=LATER) as stage:
        sent = send_chain(stage.destination, [0, 1, 2])
        zero, (body, headers), two = taken(stage.destination)
        deliver(stage.destination, (body, headers | REQUEST), two)
        step(stage, times=2)
        deliver(stage.destination, zero)
        failed = InboxMessage.objects.filter(message_id=sent[1].id, waits_for=None)
        with running(stage):
            wait_until(failed.filter(attempts=1, lease_token=None).exists, deadline=60)
        revoke(stage, sent[1].id)
        settle(stage, 2)
    assert effects() == ["0", "2"]


def need_newer_code(**which: Any) -> None:
    """Park messages as a worker does whose code is too old to read them. No worker here
    claims them within an hour: this stage could read them."""
    assert InboxMessage.objects.filter(due_at__isnull=False, **which).update(
        needs_type="tests.type",
        needs_version=2,
        waits_for=None,
        due_at=Now() + dt.timedelta(hours=1),
    )


@pytest.mark.parametrize("ordered", ["block", "skip"])
def test_unread_message_is_buried_only_after_its_predecessor(
    ordered: Order, capsys: pytest.CaptureFixture[str]
) -> None:
    with declared(failing_once(0), ordered=ordered, redelivery=LATER) as stage:
        sent = send_chain(stage.destination, [0, 1, 2])
        step(stage, times=3)
        need_newer_code(message_id=sent[1].id)
        call_command("txmsg", "contracts", "bury")
        said = capsys.readouterr().out
        assert ("Buried 0" in said, "Left: 1" in said) == (True, True)
        InboxMessage.objects.filter(message_id=sent[0].id).update(due_at=Now())
        settle(stage, 1)
        assert bury_unread("default", stage.name) == 1
        if ordered == "block":
            finish(BulkKind.DISCARD, DeadLetter.objects.get())
        settle(stage, 2)
    assert effects() == ["0", "2"]


@pytest.mark.parametrize("ordered", ["block", "skip"])
def test_unread_message_is_not_buried_while_its_predecessor_may_arrive(
    ordered: Order,
) -> None:
    with declared(effect, ordered=ordered) as stage:
        sent = send_chain(stage.destination, [0, 1])
        zero, one = taken(stage.destination)
        deliver(stage.destination, one)
        step(stage)
        need_newer_code(message_id=sent[1].id)
        assert bury_unread("default", stage.name) == 0
        deliver(stage.destination, zero)
        step(stage)
        assert bury_unread("default", stage.name) == 1


@pytest.mark.parametrize("ordered", ["block", "skip"])
def test_a_revoked_request_that_needs_newer_code_keeps_its_place(
    ordered: Order,
) -> None:
    with declared(failing_once(0), ordered=ordered, redelivery=LATER) as stage:
        sent = send_chain(stage.destination, [0, 1, 2])
        zero, (body, headers), two = taken(stage.destination)
        deliver(stage.destination, zero, (body, headers | REQUEST), two)
        step(stage, times=3)
        request = InboxMessage.objects.filter(message_id=sent[1].id)
        need_newer_code(message_id=sent[1].id)
        revoke(stage, sent[1].id)
        step(stage)
        assert effects() == []
        InboxMessage.objects.filter(message_id=sent[0].id).update(due_at=Now())
        settle(stage, 1)
        # Newer code is deployed.
        request.update(needs_type="", needs_version=None, due_at=Now())
        settle(stage, 2)
        assert request.exclude(dead_at=None).exclude(revoked_at=None).exists()
    assert effects() == ["0", "2"]


@pytest.mark.parametrize("ordered", ["block", "skip"])
def test_a_revoked_request_that_needs_newer_code_has_no_dead_letter(
    ordered: Order,
) -> None:
    with declared(failing_once(0), ordered=ordered, redelivery=LATER) as stage:
        sent = send_chain(stage.destination, [0, 1, 2])
        zero, (body, headers), two = taken(stage.destination)
        deliver(stage.destination, zero, (body, headers | REQUEST), two)
        step(stage, times=3)
        need_newer_code(message_id=sent[1].id)
        revoke(stage, sent[1].id)
        InboxMessage.objects.filter(message_id=sent[0].id).update(due_at=Now())
        settle(stage, 1)
        assert bury_unread("default", stage.name) == 0
        settle(stage, 2)
        request = InboxMessage.objects.get(message_id=sent[1].id)
        assert None not in (request.dead_at, request.revoked_at)
    assert effects() == ["0", "2"]
    assert not DeadLetter.objects.exists()


def test_followers_wait_for_a_message_that_needed_newer_code_when_it_arrived() -> None:
    """The message between the two is lost. The follower is not processed before the
    message that this code cannot read."""

    def handler(body: Numbered) -> None:
        raise AssertionError("it was overtaken")

    with declared(handler, ordered="skip") as stage:
        send_chain(stage.destination, [{"number": n} for n in (0, 1, 2)])
        (body, headers), _lost, two = taken(stage.destination)
        newer = {"txmsg-type": "tests.order_changes.Numbered;v=9;min=9"}
        deliver(stage.destination, (body, headers | newer), two)
        with txmsg(ORDER_PATIENCE=0.0):
            step(stage, times=2)
            InboxMessage.objects.exclude(waits_for=None).update(due_at=Now())
            step(stage, times=2)
        assert InboxMessage.objects.exclude(waits_for=None).exists()
        assert not Attempt.objects.exists()


def test_message_that_was_buried_unread_is_discarded_after_its_predecessor() -> None:
    with declared(refusing(0), ordered="block") as stage:
        sent = send_chain(stage.destination, [0, 1, 2, 3])
        zero, one, two, three = taken(stage.destination)
        deliver(stage.destination, zero, two, one, three)
        step(stage, times=4)
        need_newer_code(message_id__in=[sent[1].id, sent[2].id])
        assert bury_unread("default", stage.name) + bury_unread("default") == 2
        letters = {one.message_id: one.pk for one in DeadLetter.objects.all()}
        ids = [letters[one.id] for one in sent[:3]]
        for together in (ids[1:2], ids[1:3], ids[2:3]):
            discard(together)
            assert DeadLetter.objects.filter(resolution="open").count() == 3
        due_now()
        step(stage)
        assert effects() == []
        discard(ids)
        settle(stage, 1)
    assert effects() == ["3"]


def test_copy_of_a_message_that_was_buried_unread_keeps_its_place() -> None:
    with declared(refusing(0), ordered="block") as stage:
        sent = send_chain(stage.destination, [0, 1, 2])
        step(stage, times=3)
        need_newer_code(message_id=sent[1].id)
        assert bury_unread("default", stage.name) == 1
        dead, unread = DeadLetter.objects.order_by("pk")
        resolution.redeliver_copy(unread, headers={}, body=b'"edited"')
        step(stage, times=3)
        assert effects() == []
        finish(BulkKind.DISCARD, dead)
        settle(stage, 2)
    assert effects() == ["edited", "2"]


def test_messages_that_were_buried_unread_are_redelivered_in_order() -> None:
    with declared(effect, ordered="block") as stage:
        sent = send_chain(stage.destination, [0, 1, 2])
        zero, one, two = taken(stage.destination)
        deliver(stage.destination, one, two)
        step(stage, times=2)
        need_newer_code(stage=stage.name)
        deliver(stage.destination, zero)
        step(stage)
        assert bury_unread("default", stage.name) == 2
        redeliver(DeadLetter.objects.get(message_id=sent[2].id))
        step(stage)
        assert effects() == ["0"]
        redeliver(DeadLetter.objects.get(message_id=sent[1].id))
        settle(stage, 3)
    assert effects() == ["0", "1", "2"]


def finish(kind: BulkKind, letter: DeadLetter) -> None:
    bulk.finish(bulk.start(kind, {"ids": [letter.pk]}, using="default", by="test"))


def discard(ids: list[int]) -> None:
    wanted = {"ids": ids}
    bulk.finish(bulk.start(BulkKind.DISCARD, wanted, using="default", by="test"))


def genuine() -> list[str]:
    return [one for one in effects() if one != "x"]


def unseen(destination: str) -> bool:
    return QueueMessage.objects.filter(queue=destination).exists()


def test_message_naming_itself_as_predecessor_runs() -> None:
    with declared(effect, ordered="block") as stage:
        own = uuid.uuid4()
        headers = {
            "txmsg-id": str(own),
            "content-type": "application/json",
            "txmsg-key": "k",
            "txmsg-after": f"{own};at=2020-01-01T00:00:00Z",
        }
        put(stage.destination, b"1", headers)
        settle(stage, 1)


def test_queue_of_a_paused_stage_is_received_before_waits_expire() -> None:
    """A message of a paused stage has been blocked for longer than ORDER_PATIENCE.
    After the pause, the message stays blocked until the stage has read its queue, where
    the predecessor is."""
    with txmsg(ORDER_PATIENCE=60.0), declared(effect, ordered="skip") as stage:
        send_chain(stage.destination, [0, 1])
        zero, one = taken(stage.destination)
        deliver(stage.destination, one)
        step(stage)
        InboxMessage.objects.update(
            waits_since=Now() - dt.timedelta(hours=1), due_at=Now()
        )
        thread = thread_of(stage)
        thread.paused.set()
        thread.dry = True
        wake_for_parked([thread])
        thread.paused.clear()
        thread.dry = False
        wake_for_parked([thread])
        assert waiting(stage) == 1
        deliver(stage.destination, zero)
        settle(stage, 2)
    assert effects() == ["0", "1"]
