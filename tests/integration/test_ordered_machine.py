"""Messages are stored, relayed, lost, doubled, reordered, processed, buried,
redelivered and discarded in any order. The effects of each key always occur in the
order of its messages.

Hypothesis lets senders, two relays and consumers execute the real statements, one step
at a time, and may kill any of them between two steps. At the end everything is
repaired, and no message may be stuck.
"""

from __future__ import annotations

import datetime as dt
import itertools
import uuid
from collections import defaultdict
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import F
from django.db.models.functions import Now
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from django_txmsg import Refuse, stages
from django_txmsg.consuming import ordering
from django_txmsg.consuming.stage_thread import StageThread
from django_txmsg.dead_letters import bulk
from django_txmsg.envelope.message import Message
from django_txmsg.models import DeadLetter, InboxMessage, KeyTail, OutboxMessage
from django_txmsg.models.bulk_operation import BulkKind
from django_txmsg.models.inbox import InboxManager
from django_txmsg.models.inbox_order import OrderManager
from django_txmsg.models.outbox_claim import Claimed
from django_txmsg.models.queue import QueueMessage
from django_txmsg.relaying.lane import link
from django_txmsg.sending.outbox import send_message
from tests.app.models import Effect
from tests.running import committing, put, ship, step, thread_of, txmsg

DESTINATION = "tests.ordered.machine"
_numbers = itertools.count()


class Died(BaseException):
    """The exception with which a worker is killed."""


class Killer:
    """Kills a worker before or after one of the statements that process a message."""

    STEPS = (
        *("record", "record_and_begin", "take", "wait", "_look"),
        *("wake", "finish", "park", "mark_dead"),
    )

    def __init__(self) -> None:
        self.step: str | None = None
        self.after = False

    def __enter__(self) -> Killer:
        self._real = {
            name: (manager, getattr(manager, name))
            for manager in (InboxManager, OrderManager)
            for name in self.STEPS
            if name in vars(manager)
        }
        for name, (manager, real) in self._real.items():
            setattr(manager, name, self._watched(name, real))
        return self

    def __exit__(self, *_: object) -> None:
        for name, (manager, real) in self._real.items():
            setattr(manager, name, real)

    def _watched(self, name: str, real: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            strikes = self.step == name
            if strikes and not self.after:
                raise Died
            answer = real(*given, **named)
            if strikes:
                raise Died
            return answer

        return call


class Life(RuleBasedStateMachine):
    """The state machine: messages with keys, and all events that can happen to them."""

    ordered: stages.Order = "block"

    def __init__(self) -> None:
        super().__init__()
        models = (
            OutboxMessage,
            InboxMessage,
            DeadLetter,
            QueueMessage,
            Effect,
            KeyTail,
        )
        for model in models:
            model.objects.all().delete()
        self.stored: list[str] = []
        self.lost: list[tuple[bytes, dict[str, str]]] = []
        self.killer = Killer()
        self.killer.__enter__()

    @initialize(
        ordered=st.sampled_from(["block", "skip"]), batch=st.sampled_from([1, 4])
    )
    def declare(self, ordered: stages.Order, batch: int) -> None:
        self.ordered = ordered
        stages.stage(DESTINATION, ordered=ordered, batch=batch)(self.handle)
        (self.stage,) = stages.find([DESTINATION])
        self.bad: set[str] = set()

    def handle(self, message: Message) -> None:
        Effect.objects.create(name=str(message.body), message_id=str(message.id))
        if self.killer.step == "handler":
            raise Died
        if message.body in self.bad:
            raise Refuse("bad")
        if str(message.body).endswith("!") and message.delivery_attempt == 1:
            raise ValueError

    def teardown(self) -> None:
        """Repair everything, and check that each message arrives once, in its order."""
        try:
            if not hasattr(self, "stage"):
                return
            self.killer.step = None
            self.bad.clear()
            OutboxMessage.objects.update(lease_until=None, due_at=Now())
            ship()
            for body, headers in self.lost:
                put(DESTINATION, body, headers)
            self.leases_end()
            for _ in range(60):
                for letter in DeadLetter.objects.filter(resolution="open"):
                    self.resolve(letter, BulkKind.REDELIVER)
                self.minutes_pass(1)
                step(self.stage)
                if not QueueMessage.objects.exists() and not self.open():
                    break
            assert not self.open(), list(self.open().values())
            discarded = DeadLetter.objects.filter(resolution="discarded")
            gone = {str(one) for one in discarded.values_list("message_id", flat=True)}
            done = list(Effect.objects.values_list("message_id", flat=True))
            assert set(done) | gone >= set(self.stored), "lost"
        finally:
            self.killer.__exit__()
            stages.unregister(DESTINATION)

    def open(self) -> Any:
        return InboxMessage.objects.filter(processed_at=None, dead_at=None)

    @rule(key=st.sampled_from("ab"), fails=st.booleans())
    def store(self, key: str, fails: bool) -> None:
        number = next(_numbers)
        with transaction.atomic():
            sent = send_message(DESTINATION, f"{key}{number}{'!' * fails}", key=key)
        self.stored.append(str(sent.id))

    @rule()
    def relay(self) -> None:
        ship()

    @rule(
        how=st.sampled_from(["before the link", "before the send", "before the mark"])
    )
    def a_relay_dies(self, how: str) -> None:
        token = uuid.uuid4()
        rows: list[Claimed] = OutboxMessage.objects.claim(
            broker="default", token=token, lease=600.0, limit=3
        )
        if how != "before the link":
            rows = link(rows, token, using="default", broker="default", wait=9)
        if how == "before the mark":
            for row in rows:
                self.put(row)

    def put(self, row: Claimed) -> None:
        from django_txmsg import wire

        put(DESTINATION, row.body, wire.headers_of(row, "tests", row.created))

    @rule()
    def leases_end(self) -> None:
        past = Now() - dt.timedelta(seconds=1)
        for model in (OutboxMessage, InboxMessage):
            model.objects.filter(lease_until__isnull=False).update(lease_until=past)

    @rule(number=st.integers(0, 5))
    def the_broker_reorders(self, number: int) -> None:
        rows = list(QueueMessage.objects.order_by("id"))
        if rows:
            row = rows[number % len(rows)]
            row.delete()
            put(DESTINATION, bytes(row.body), dict(row.headers))

    @rule(number=st.integers(0, 5))
    def the_broker_doubles(self, number: int) -> None:
        rows = list(QueueMessage.objects.order_by("id"))
        if rows:
            row = rows[number % len(rows)]
            put(DESTINATION, bytes(row.body), dict(row.headers))

    @rule()
    def the_broker_keeps_one_back(self) -> None:
        row = QueueMessage.objects.order_by("id").first()
        if row is not None:
            row.delete()
            self.lost.append((bytes(row.body), dict(row.headers)))

    @rule()
    def it_comes_after_all(self) -> None:
        if self.lost:
            put(DESTINATION, *self.lost.pop())

    @rule()
    def consume(self) -> None:
        self.killer.step = None
        step(self.stage)

    @rule(at=st.sampled_from((*Killer.STEPS, "handler")), after=st.booleans())
    def a_consumer_dies(self, at: str, after: bool) -> None:
        before = list(QueueMessage.objects.values_list("body", "headers"))
        self.killer.step, self.killer.after = at, after
        thread: StageThread = thread_of(self.stage)
        try:
            thread.parked_due.set()
            thread._step()
        except Died:
            connection.close()  # with what its transaction has done
        finally:
            self.killer.step = None
            thread._close()
        left = {dict(h)["txmsg-id"] for h in QueueMessage.objects.values_list(
            "headers", flat=True)}  # fmt: skip
        for body, headers in before:
            if headers["txmsg-id"] not in left:
                # A broker redelivers a message that was not acknowledged.
                put(DESTINATION, bytes(body), dict(headers))

    @rule(minutes=st.sampled_from([1, 60]))
    def minutes_pass(self, minutes: int) -> None:
        """Move all due times into the past by `minutes`, except those of rows that no
        stage will check again."""
        by = dt.timedelta(minutes=minutes)
        rows = InboxMessage.objects.filter(due_at__year__lt=8999)
        rows.update(due_at=F("due_at") - by)
        waiting = InboxMessage.objects.filter(waits_since__isnull=False)
        if minutes == 1:  # else what is kept back would be despaired of
            waiting.update(waits_since=F("waits_since") - by / 60)

    @rule()
    def ask(self) -> None:
        ordering.ask(self.stage)

    @rule()
    def one_goes_bad(self) -> None:
        row = InboxMessage.objects.filter(waits_for__isnull=False).first()
        if row is not None and row.body is not None:
            import json

            self.bad.add(json.loads(bytes(row.body)))

    @rule(kind=st.sampled_from([BulkKind.REDELIVER, BulkKind.DISCARD]))
    def resolve_one(self, kind: BulkKind) -> None:
        letter = DeadLetter.objects.filter(resolution="open").first()
        if letter is not None:
            self.bad.clear()
            self.resolve(letter, kind)

    def resolve(self, letter: DeadLetter, kind: BulkKind) -> None:
        bulk.finish(
            bulk.start(kind, {"ids": [letter.pk]}, using="default", by="machine")
        )

    @invariant()
    def every_key_is_in_order(self) -> None:
        """Check that the messages of a key are processed in the order in which they
        were stored. Only dead messages that were skipped may be processed late."""
        late = set(
            DeadLetter.objects.values_list("message_id", flat=True)
            if self.ordered == "skip"
            else ()
        )
        places: dict[str, list[int]] = defaultdict(list)
        done: list[str] = []
        for name, message_id in Effect.objects.order_by("id").values_list(
            "name", "message_id"
        ):
            done.append(message_id)
            if uuid.UUID(message_id) not in late:
                places[name[0]].append(int(name[1:].rstrip("!")))
        assert len(set(done)) == len(done), "twice"
        for key, numbers in places.items():
            assert numbers == sorted(numbers), (key, numbers)


# The real rows of the real database, of which PostgreSQL is the one with many hands.
@committing
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("examples", "steps"), [(15, 30), pytest.param(400, 60, marks=pytest.mark.soak)]
)
def test_every_key_in_order_and_nothing_stuck(examples: int, steps: int) -> None:
    with txmsg():
        run_state_machine_as_test(
            Life,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
