"""Every accepted message is a row, whatever is rolled back around it.

Random programs are compared with a model, which consists of a few lists and their
copies. After each step, the transaction must see the model's messages. At the end, the
tables, the queue, the hooks and the signals must match the model.
"""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse
from django.test import Client, override_settings
from django.urls import path
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from django_txmsg import (
    cancel_message,
    outbox_session,
    reschedule_message,
    send_message,
    send_messages,
    signals,
)
from django_txmsg.envelope.message import Message, new_id
from django_txmsg.errors import AlreadyPending, DuplicateMessage
from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage, QueueMessage
from tests.app.models import Effect
from tests.running import IMPATIENT, committing, declared, step

pytestmark = [
    committing,
    # Django 6.1 deprecates what projects still call.
    pytest.mark.filterwarnings("ignore:savepoint"),
]

OUT = "tests.out"
HOUR = dt.timedelta(hours=1)
PLACES = ["block", "session", "request", "stage", "batch"]
#: From eight on they are stored by COPY.
MANY = 9

Step = tuple[Any, ...]


class Stop(Exception):
    """The exception that random programs raise."""


@dataclass
class Row:
    """The model of one stored message."""

    id: uuid.UUID
    delayed: bool = False
    cancelled: bool = False
    unique: str = ""
    key: str = ""


@dataclass
class World:
    """The model of the open transaction."""

    effects: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def leaves(self, row: Row) -> bool:
        """Return whether the row can be sent: it is due, and no delayed row of its key
        precedes it."""
        before = self.rows[: self.rows.index(row) + 1]
        held = [one for one in before if one.delayed and not one.cancelled]
        return not row.cancelled and not any(
            one is row or one.key == row.key != "" for one in held
        )

    def pending(self, message_id: uuid.UUID) -> Row | None:
        for row in self.rows:
            if row.id == message_id and not row.cancelled:
                return row
        return None

    def holder(self, unique: str) -> Row | None:
        held = [row for row in self.rows if row.unique == unique and not row.cancelled]
        return held[0] if held else None


class Program:
    """Executes random steps, and applies each to the model too."""

    def __init__(self, steps: list[Step], *, fails: bool) -> None:
        self.steps, self.fails = steps, fails
        #: What a stage would take for its handler's failure.
        self.surprise: BaseException | None = None
        self.begin()

    def begin(self) -> None:
        self.world, self.hooks, self.ran = World(), list[str](), list[str]()
        self.sent: list[uuid.UUID] = []
        self.number = 0

    def __call__(self) -> None:
        self.begin()
        try:
            self._block(self.steps)
        except BaseException as error:
            self.surprise = error
            raise
        if self.fails:
            self.world, self.hooks = World(), []
            raise Stop

    def _block(self, steps: list[Step]) -> None:
        """Execute the steps of one atomic block, including savepoints made with plain
        SQL."""
        entered = copy.deepcopy(self.world)
        made: list[tuple[str, World]] = []
        for name, *arguments in steps:
            self.number += 1
            if name in ("savepoint", "roll back to", "release"):
                self._by_hand(name, made, *arguments)
            elif name == "undo the block":
                self._undo(entered)
                made.clear()
            else:
                getattr(self, "_" + name)(*arguments)
            self._look()

    def _look(self) -> None:
        rows = OutboxMessage.objects.filter(destination=OUT, last_error="")
        ids = rows.order_by("pk").values_list("message_id", flat=True)
        assert list(ids) == [row.id for row in self.world.rows if not row.cancelled]

    def _undo(self, entered: World) -> None:
        """Roll back an inner block with plain SQL. The block stays open."""
        if connection.savepoint_ids:
            with connection.cursor() as cursor:
                sid = connection.savepoint_ids[-1].strip('"')
                cursor.execute(f'ROLLBACK TO SAVEPOINT "{sid}"')
            self.world = copy.deepcopy(entered)

    def _by_hand(
        self, name: str, made: list[tuple[str, World]], which: int, raw: bool
    ) -> None:
        if name == "savepoint":
            if raw:
                sid = f"mine{self.number}"
                self._execute(f"SAVEPOINT {sid}")
            else:
                sid = transaction.savepoint()
            made.append((sid, copy.deepcopy(self.world)))
        elif made:
            which %= len(made)
            sid, before = made[which]
            if name == "release":
                if raw:
                    self._execute(f"RELEASE SAVEPOINT {sid}")
                else:
                    transaction.savepoint_commit(sid)
                del made[which:]
            else:
                if raw:
                    self._execute(f"ROLLBACK TO SAVEPOINT {sid}")
                else:
                    transaction.savepoint_rollback(sid)
                del made[which + 1 :]
                self.world = copy.deepcopy(before)

    def _execute(self, sql: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(sql)

    def _atomic(self, kind: str, end: str, steps: list[Step]) -> None:
        world, hooks = copy.deepcopy(self.world), list(self.hooks)
        block = outbox_session if kind == "session" else transaction.atomic
        with contextlib.suppress(Stop), block():
            self._block(steps)
            if end == "roll back":
                transaction.set_rollback(True)
            if end == "raise":
                raise Stop
        if end != "leave":
            self.world, self.hooks = world, hooks

    def _durable(self) -> None:
        with pytest.raises(RuntimeError), transaction.atomic(durable=True):
            send_message(OUT, "never")

    def _effect(self) -> None:
        self.world.effects.append(f"{self.number}")
        Effect.objects.create(name=f"{self.number}")

    def _on_commit(self) -> None:
        number = f"{self.number}"
        self.hooks.append(number)
        transaction.on_commit(lambda: self.ran.append(number))

    def _send(self, **more: Any) -> None:
        message = send_message(OUT, self.number, **more)
        self.sent.append(message.id)
        row = Row(message.id, delayed="delay" in more, key=more.get("key", ""))
        self.world.rows.append(row)

    def _send_with_a_key(self) -> None:
        self._send(key="k")

    def _send_later(self) -> None:
        self._send(delay=HOUR)

    def _send_many(self, count: int) -> None:
        bodies = ({"destination": OUT, "body": number} for number in range(count))
        for message in send_messages(bodies):
            self.sent.append(message.id)
            self.world.rows.append(Row(message.id))

    def _send_again(self, which: int) -> None:
        """Send a message with an id that was used before. If a row has this id, the
        message is refused."""
        message_id = self._one_of_the_sent(which)
        if any(row.id == message_id for row in self.world.rows):
            with pytest.raises(DuplicateMessage):
                send_message(OUT, "twice", message_id=message_id)
        else:
            self._send(message_id=message_id)

    def _send_unique(self, unique: str, skip: bool) -> None:
        holder = self.world.holder(unique)
        if holder is None:
            message = send_message(OUT, self.number, unique=unique)
            self.sent.append(message.id)
            self.world.rows.append(Row(message.id, unique=unique))
        elif skip:
            there = send_message(OUT, "skip", unique=unique, on_conflict="skip")
            assert there.id == holder.id
        else:
            with pytest.raises(AlreadyPending):
                send_message(OUT, "error", unique=unique)

    def _cancel(self, which: int) -> None:
        message_id = self._one_of_the_sent(which)
        row = self.world.pending(message_id)
        assert cancel_message(message_id) == (row is not None)
        if row is not None:
            row.cancelled = True

    def _reschedule(self, which: int, later: bool) -> None:
        message_id = self._one_of_the_sent(which)
        row = self.world.pending(message_id)
        delay = HOUR if later else dt.timedelta(0)
        assert reschedule_message(message_id, delay=delay) == (row is not None)
        if row is not None:
            row.delayed = later

    def _one_of_the_sent(self, which: int) -> uuid.UUID:
        """Return the id of a message that was sent. If none was sent, return a new
        id."""
        return (self.sent or [new_id()])[which % max(len(self.sent), 1)]


def _run_in_block(work: Callable[[], None]) -> None:
    with contextlib.suppress(Stop), transaction.atomic():
        work()


def _run_in_session(work: Callable[[], None]) -> None:
    with contextlib.suppress(Stop), outbox_session():
        work()


_view: list[Callable[[], None]] = []


def view(request: HttpRequest) -> HttpResponse:
    _view[0]()
    return HttpResponse()


urlpatterns = [path("view", view)]


def _run_in_request(work: Callable[[], None]) -> None:
    _view[:] = [work]
    middleware = ["django_txmsg.middleware.OutboxMiddleware"]
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=middleware):
        Client(raise_request_exception=False).post("/view")


def _run_in_stage(work: Callable[[], None]) -> None:
    with declared(lambda _: work()) as stage:
        with transaction.atomic():
            send_message(stage.destination, None)
        step(stage)


def _run_in_batch(work: Callable[[], None]) -> None:
    """Execute `work` in the handler of a batch's second message. The first message's
    handler sends a message and succeeds. The third message's handler cancels the
    message that was sent, and then raises an exception."""
    neighbours: list[uuid.UUID] = []

    def handler(message: Message) -> None:
        if message.body == "before":
            Effect.objects.create(name="before")
            neighbours.append(send_message("tests.before", None).id)
        elif message.body == "program":
            work()
        else:
            cancel_message(neighbours[0])
            reschedule_message(new_id(), delay=HOUR)
            send_message("tests.after", None)
            raise Stop

    with declared(handler, batch=3) as stage:
        bodies = ["before", "program", "after"]
        with transaction.atomic():
            send_messages({"destination": stage.destination, "body": b} for b in bodies)
        step(stage)
    left = OutboxMessage.objects.filter(destination__in=["tests.before", "tests.after"])
    assert [row.state for row in left] == ["dispatched"]
    assert left.get().destination == "tests.before"
    (effect,) = Effect.objects.filter(name="before")
    effect.delete()


RUN = {
    "block": _run_in_block,
    "session": _run_in_session,
    "request": _run_in_request,
    "stage": _run_in_stage,
    "batch": _run_in_batch,
}


LEAF = st.one_of(
    st.sampled_from(
        [
            ("effect",),
            ("on_commit",),
            ("send",),
            ("send_with_a_key",),
            ("send_later",),
            ("durable",),
            ("undo the block",),
        ]
    ),
    st.tuples(st.just("send_many"), st.sampled_from([0, 2, MANY])),
    st.tuples(st.just("send_again"), st.integers(0, 9)),
    st.tuples(st.just("send_unique"), st.sampled_from("uv"), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("reschedule"), st.integers(0, 9), st.booleans()),
    st.tuples(
        st.sampled_from(["savepoint", "roll back to", "release"]),
        st.integers(0, 3),
        st.booleans(),
    ),
)
STEPS = st.recursive(
    st.lists(LEAF, max_size=8),
    lambda steps: st.lists(
        LEAF
        | st.tuples(
            st.just("atomic"),
            st.sampled_from(["atomic", "session"]),
            st.sampled_from(["leave", "raise", "roll back"]),
            steps,
        ),
        max_size=8,
    ),
    max_leaves=4,
)


def empty() -> None:
    """Empty the tables before an example."""
    for model in (OutboxMessage, QueueMessage, InboxMessage, DeadLetter, Effect):
        model.objects.all().delete()


@contextlib.contextmanager
def announced() -> Iterator[list[uuid.UUID]]:
    """Collect the ids of messages that the signal reports as stored."""
    ids: list[uuid.UUID] = []

    def hear(id: uuid.UUID, destination: str, **_: Any) -> None:
        if destination == OUT:
            ids.append(id)

    signals.message_stored.connect(hear)
    try:
        yield ids
    finally:
        signals.message_stored.disconnect(hear)


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, fails=st.booleans())
@example([("savepoint", 0, False), ("send",), ("roll back to", 0, False)], False)
@example([("savepoint", 0, True), ("send",), ("roll back to", 0, True)], False)
@example([("send",), ("atomic", "atomic", "raise", [("cancel", 0)])], False)
@example([("send",), ("atomic", "session", "raise", [("reschedule", 3, True)])], False)
@example([("atomic", "atomic", "leave", [("send",), ("undo the block",)])], False)
@example([("send_with_a_key",), ("send_with_a_key",), ("reschedule", 0, True)], False)
@example([("send",), ("on_commit",), ("undo the block",), ("send_again", 0)], False)
def test_only_messages_not_rolled_back_are_left(
    place: str, steps: list[Step], fails: bool
) -> None:
    empty()
    program = Program(steps, fails=fails)
    inline = {
        **IMPATIENT,
        "DISPATCH_ON_COMMIT": "inline",
        "REDELIVERY": {"MAX_REDELIVERIES": 0},
    }
    with override_settings(TXMSG=inline), announced() as heard:
        RUN[place](program)

    if program.surprise is not None:
        raise program.surprise
    world = program.world
    assert list(Effect.objects.values_list("name", flat=True)) == world.effects
    rows = list(OutboxMessage.objects.filter(destination=OUT).order_by("pk"))
    assert [row.message_id for row in rows] == [row.id for row in world.rows]
    assert {row.message_id: row.state for row in rows} == {
        row.id: "cancelled"
        if row.cancelled
        else ("dispatched" if world.leaves(row) else "pending")
        for row in world.rows
    }
    queued = QueueMessage.objects.filter(queue=OUT).values_list("headers", flat=True)
    leaves = [str(row.id) for row in world.rows if world.leaves(row)]
    assert sorted(one["txmsg-id"] for one in queued) == sorted(leaves)
    assert program.ran == program.hooks
    assert sorted(heard) == sorted(row.id for row in world.rows)
