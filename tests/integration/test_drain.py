"""`django_txmsg.testing.drain`, used as in a project's tests."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from django.db import transaction
from django.db.models.functions import Now
from django.test import SimpleTestCase, TestCase, TransactionTestCase, override_settings

from django_txmsg import (
    Destination,
    Message,
    Redeliver,
    RedeliveryPolicy,
    Refuse,
    send_message,
    stages,
)
from django_txmsg.errors import ConfigurationError
from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.models.queue import QueueMessage
from django_txmsg.testing import (
    ScriptedBroker,
    answers,
    drain,
    embedded,
    outbox_messages,
)
from tests.app.models import Order
from tests.celery_shop import add
from tests.running import declared, txmsg

HOUR = dt.timedelta(hours=1)
#: Threads with a connection, which would keep a test database from being dropped.
CONNECTED = ("txmsg-dispatch-", "txmsg-notify-")


def connected() -> list[str]:
    """Return the names of the threads that have an open connection."""
    threads = [thread.name for thread in threading.enumerate()]
    return [one for one in threads if one.startswith(CONNECTED)]


class Declares(SimpleTestCase):
    """A mixin that declares stages and removes them after the test."""

    def stage(self, handler: Callable[..., Any], *args: Any, **kw: Any) -> str:
        block = declared(handler, *args, **kw)
        name = block.__enter__().name
        self.addCleanup(block.__exit__, None, None, None)
        return name


class TestInsideATestCase(TestCase, Declares):
    """drain() in a TestCase: no transaction commits, so no other connection sees the
    rows."""

    def test_drain_processes_a_message_and_those_it_causes(self) -> None:
        def place(message: Message) -> None:
            Order.objects.create(number=message.body["number"], total=1)
            send_message("drained.paid", {"number": message.body["number"]})

        paid: list[Message] = []
        self.stage(place, "drained.place")
        self.stage(paid.append, "drained.paid")
        sent = send_message("drained.place", {"number": "7"})

        drained = drain()

        assert (drained.dispatched, drained.processed) == (2, 2)
        assert Order.objects.get().number == "7"
        assert [message.body for message in paid] == [{"number": "7"}]
        assert OutboxMessage.objects.filter(dispatched_at=None).count() == 0
        assert InboxMessage.objects.filter(processed_at=None).count() == 0
        assert sent.id in InboxMessage.objects.values_list("message_id", flat=True)
        assert drain() == type(drained)(), "nothing is left to do"

    @override_settings(
        TXMSG={
            "BROKERS": {
                "default": {"URL": "stomp://there:2"},
                "celery": {"URL": "celery://tests.celery_shop:app"},
            }
        }
    )
    def test_a_stage_may_call_a_celery_task_which_is_a_row(self) -> None:
        # tests.celery_shop sends to a broker on which nothing listens.
        def place(message: Message) -> None:
            add.delay(message.body["one"], 2)

        self.stage(place, "drained.place")
        send_message("drained.place", {"one": 1})
        add.delay(3, 4)

        drained = drain()

        assert (drained.dispatched, drained.processed, drained.tasks) == (1, 1, 2)
        rows = OutboxMessage.objects.filter(broker="celery")
        assert {row.state for row in rows} == {"pending"}
        assert {row.attempts for row in rows} == {0}
        assert len(outbox_messages("tests.celery_shop.add")) == 2

    def test_a_copy_is_dropped_by_the_inbox(self) -> None:
        seen: list[Message] = []
        self.stage(seen.append, "drained.once")
        send_message("drained.once", 1)
        drain()
        assert not QueueMessage.objects.exists()
        OutboxMessage.objects.update(dispatched_at=None)

        drained = drain()

        assert (drained.dispatched, drained.duplicates, drained.processed) == (1, 1, 0)
        assert len(seen) == 1

    def test_a_handler_s_exception_is_raised_once_all_is_done(self) -> None:
        done: list[Message] = []

        def fail(message: Message) -> None:
            Order.objects.create(number="never", total=1)
            raise LookupError("no such customer")

        self.stage(fail, "drained.fails")
        self.stage(done.append, "drained.works")
        send_message("drained.fails", None)
        send_message("drained.works", None)

        with pytest.raises(LookupError, match="no such customer"):
            drain()

        assert len(done) == 1
        assert not Order.objects.exists()
        parked = InboxMessage.objects.get(stage="drained.fails")
        assert parked.due_at is not None
        assert parked.attempts == 1

    def test_drain_runs_redeliveries_whose_time_the_test_has_advanced(self) -> None:
        attempts: list[int] = []

        def fail_twice(message: Message) -> None:
            attempts.append(message.delivery_attempt)
            if len(attempts) < 3:
                raise ConnectionError("not yet")

        self.stage(fail_twice, "drained.flaky")
        send_message("drained.flaky", None)

        drained = drain(ahead=HOUR, raises=False)

        assert attempts == [1, 2, 3]
        assert (drained.redelivered, drained.processed) == (2, 1)
        assert [str(error) for error in drained.errors] == ["not yet"] * 2

    def test_a_message_that_always_fails_ends_in_the_dead_letters(self) -> None:
        def fail(message: Message) -> None:
            raise ZeroDivisionError

        policy = RedeliveryPolicy(max_redeliveries=2)
        self.stage(fail, "drained.poison", redelivery=policy)
        send_message("drained.poison", {"kept": True})

        drained = drain(ahead=HOUR, raises=False)

        assert (drained.redelivered, drained.dead) == (2, 1)
        letter = DeadLetter.objects.get()
        assert letter.stage == "drained.poison"
        assert b"kept" in bytes(letter.body)

    def test_failure_of_an_assertion_in_a_handler_is_raised(self) -> None:
        def fail(message: Message) -> None:
            pytest.fail("not this message")

        self.stage(fail, "drained.failing")
        send_message("drained.failing", None)

        with pytest.raises(pytest.fail.Exception, match="not this message"):
            drain()

    def test_answers_that_cannot_be_declared_leave_all_stages(self) -> None:
        seen: list[Message] = []
        self.stage(seen.append, "drained.other", name="drained.asked")
        self.stage(seen.append, "drained.asked", name="drained.real")

        asked = Destination("drained.asked", int, reply=int)
        with pytest.raises(ConfigurationError, match="Two stages"), answers(asked, 1):
            pass

        assert len(stages.find(["drained.asked", "drained.real"])) == 2

    def test_verdicts_of_a_handler_are_not_raised(self) -> None:
        def refuse(message: Message) -> None:
            if message.body == "refuse":
                raise Refuse("never")
            raise Redeliver(after=60)

        self.stage(refuse, "drained.verdicts")
        send_message("drained.verdicts", "refuse")
        send_message("drained.verdicts", "later")

        drained = drain()

        assert (drained.dead, drained.redelivered, drained.errors) == (1, 1, [])

    def test_blocking_redelivery_blocks_no_test(self) -> None:
        policy = RedeliveryPolicy(
            max_redeliveries=3, initial_delay=600, max_delay=600, mode="blocking"
        )

        def fail(message: Message) -> None:
            raise ConnectionError

        self.stage(fail, "drained.blocking", redelivery=policy)
        send_message("drained.blocking", None)

        drained = drain(raises=False)

        assert drained.dead == 1
        assert len(drained.errors) == 4

    def test_drain_leaves_a_delayed_message_until_the_test_advances_time(self) -> None:
        seen: list[Message] = []
        self.stage(seen.append, "drained.later")
        for minutes in (50, 20, 90):
            send_message("drained.later", minutes, delay=dt.timedelta(minutes=minutes))

        assert drain().dispatched == 0
        drain(ahead=HOUR)

        assert [message.body for message in seen] == [20, 50]

    def test_the_times_of_several_calls_add_up(self) -> None:
        seen: list[Message] = []
        self.stage(seen.append, "drained.later")
        send_message("drained.later", 90, delay=dt.timedelta(minutes=90))
        send_message("drained.later", 110, delay=dt.timedelta(minutes=110))

        drain(ahead=HOUR)
        assert not seen
        drain(ahead=dt.timedelta(minutes=40))
        assert [message.body for message in seen] == [90]
        drain(ahead=dt.timedelta(minutes=11))

        assert [message.body for message in seen] == [90, 110]

    def test_time_cannot_go_back(self) -> None:
        wrong: Any
        for wrong in (-HOUR, 5):
            with pytest.raises(ValueError, match="ahead must be a timedelta >= 0"):
                drain(ahead=wrong)

    def test_a_message_that_expires_in_the_outbox_counts_as_dead(self) -> None:
        send_message("drained.expired", 1, expires=HOUR)
        OutboxMessage.objects.update(expires_at=Now())

        assert drain().dead == DeadLetter.objects.count() == 1

    def test_an_unreadable_message_is_counted_and_raises_nothing(self) -> None:
        seen: list[int] = []

        def take(body: int) -> None:
            seen.append(body)

        self.stage(take, Destination("drained.typed", int), name="drained.typed")
        send_message("drained.typed", "no number")

        drained = drain()

        assert (drained.dead, drained.errors, seen) == (1, [], [])

    def test_ahead_is_the_time_of_all_redeliveries_together(self) -> None:
        attempts: list[int] = []

        def fail(message: Message) -> None:
            attempts.append(message.delivery_attempt)
            raise ZeroDivisionError

        policy = RedeliveryPolicy(initial_delay=10.0, backoff=1.0, jitter=0.0)
        self.stage(fail, "drained.slowly", redelivery=policy)
        send_message("drained.slowly", None)

        drain(ahead=dt.timedelta(seconds=25), raises=False)

        assert attempts == [1, 2, 3]

    def test_ahead_does_not_deliver_what_waits_behind_a_dead_message(self) -> None:
        def refuse(message: Message) -> None:
            raise Refuse("never")

        self.stage(refuse, "drained.blocked", ordered="block")
        for number in (1, 2):
            send_message("drained.blocked", number, key="k")

        drained = drain(ahead=HOUR)

        assert drained.dead == 1

    def test_a_topic_reaches_every_stage_that_listens(self) -> None:
        first: list[Message] = []
        second: list[Message] = []
        self.stage(first.append, "topic:drained.news", name="first")
        self.stage(second.append, "topic:drained.news", name="second")
        send_message("topic:drained.news", 1)

        drain()

        assert [m.body for m in first] == [m.body for m in second] == [1]

    def test_a_topic_keeps_its_copies_for_stages_that_a_later_call_names(self) -> None:
        seen: list[Message] = []
        self.stage(seen.append, "topic:drained.news", name="first")
        self.stage(seen.append, "topic:drained.news", name="second")
        send_message("topic:drained.news", 1)

        drain("first")
        assert [message.body for message in seen] == [1]
        drain("second")

        assert [message.body for message in seen] == [1, 1]

    def test_every_transaction_mode_runs(self) -> None:
        for mode in ("outbox", "best_effort_1pc", "broker_only"):
            seen: list[Message] = []

            def pass_on(message: Message) -> None:
                send_message(f"{message.destination}.next", message.body)

            self.stage(pass_on, f"drained.{mode}", transaction=mode)
            self.stage(seen.append, f"drained.{mode}.next")
            send_message(f"drained.{mode}", mode)
            drained = drain()
            assert drained.processed == 2, mode
            assert [message.body for message in seen] == [mode]

    def test_a_batch_stage_gets_its_messages_together(self) -> None:
        seen: list[Message] = []
        self.stage(seen.append, "drained.batch", batch=10)
        for number in range(25):
            send_message("drained.batch", number)

        assert drain().processed == 25
        assert sorted(message.body for message in seen) == list(range(25))

    def test_only_the_named_stages_run(self) -> None:
        first: list[Message] = []
        second: list[Message] = []
        name = self.stage(first.append, "drained.first")
        self.stage(second.append, "drained.second")
        send_message("drained.first", 1)
        send_message("drained.second", 2)

        drain(name)

        assert len(first) == 1
        assert not second
        drain()
        assert len(second) == 1

    def test_messages_that_go_in_a_circle_are_found_out(self) -> None:
        def again(message: Message) -> None:
            send_message("drained.circle", message.body + 1)

        self.stage(again, "drained.circle")
        send_message("drained.circle", 0)

        with pytest.raises(AssertionError, match=r"drained\.circle.*circle"):
            drain(limit=20)

    def test_no_broker_is_asked_whatever_the_settings_say(self) -> None:
        seen: list[Message] = []
        self.stage(seen.append, "drained.anywhere")
        nowhere = {
            "default": {"URL": "stomp://127.0.0.1:1"},
            "without-url": {"BACKEND": "django_txmsg.testing.unsent.Unsent"},
        }
        with override_settings(TXMSG={"SERVICE": "shop", "BROKERS": nowhere}):
            send_message("drained.anywhere", 1)
            drain()
        assert len(seen) == 1

    def test_stored_messages_can_be_read_without_sending(self) -> None:
        sent = send_message("drained.a", {"n": 1}, headers={"x": "y"}, key="k")
        send_message("drained.b", b"\0bytes")

        first, second = outbox_messages()
        assert (first.id, first.destination, first.body) == (
            sent.id,
            "drained.a",
            {"n": 1},
        )
        assert (dict(first.headers), first.key) == ({"x": "y"}, "k")
        assert second.body == b"\0bytes"
        assert [message.id for message in outbox_messages("drained.a")] == [sent.id]


class TestWithTwoDatabases(TestCase, Declares):
    """drain() in a TestCase that may use a second database."""

    databases: ClassVar[set[str]] = {"default", "other"}

    @override_settings(TXMSG={"SERVICE": "tests", "HTTP": {"USING": "other"}})
    def test_drain_dispatches_from_the_databases_of_the_relay(self) -> None:
        seen: list[Message] = []
        self.stage(seen.append, "drained.elsewhere")
        send_message("drained.elsewhere", 1, using="other")

        assert drain().dispatched == len(seen) == 1

    def test_answers_come_from_the_broker_and_database_of_the_real_stage(self) -> None:
        self.stage(print, "drained.asked", broker="apart", using="other")
        asked = Destination("drained.asked", int, reply=int)

        with txmsg(), answers(asked, 1) as came:
            send_message(asked, 7, broker="apart")
            drain()

        assert came == [7]
        assert InboxMessage.objects.using("other").get().stage == "drained.asked"


@override_settings(TXMSG={"SERVICE": "tests", "HTTP": {"USING": "other"}})
class TestWithoutTheSecondDatabase(TestCase, Declares):
    """drain() in a TestCase that may not use the second database of its project."""

    def test_drain_leaves_out_a_database_that_the_test_may_not_use(self) -> None:
        seen: list[Message] = []
        self.stage(seen.append, "drained.here")
        send_message("drained.here", 1)

        assert drain().dispatched == len(seen) == 1


class TestWhereTransactionsCommit(TransactionTestCase, Declares):
    """drain() in a TransactionTestCase, while another thread dispatches messages after
    each commit."""

    available_apps: ClassVar[list[str]] = ["django_txmsg", "tests.app"]

    @override_settings(TXMSG={"SERVICE": "tests", "DISPATCH_ON_COMMIT": "thread"})
    def test_drain_waits_for_messages_that_a_dispatcher_holds(self) -> None:
        seen: list[Message] = []
        self.stage(seen.append, "drained.committed")
        for round_ in range(5):
            with transaction.atomic():
                for number in range(5):
                    send_message("drained.committed", number)
            drain()
            assert len(seen) == 5 * (round_ + 1)
            assert not connected()
        with embedded(), transaction.atomic():  # as under pytest
            send_message("drained.committed", 5)
        assert not connected()


@pytest.mark.django_db
def test_hooks_that_a_test_case_runs_send_nothing_to_a_broker_outside(
    django_capture_on_commit_callbacks: Any,
) -> None:
    """The TestCase's transaction never commits, so nothing may be sent."""
    with ScriptedBroker() as broker:
        for url, left in ((broker.url, 1), ("database://", 0)):
            brokers = {"default": {"URL": url}}
            with (
                txmsg(BROKERS=brokers, DISPATCH_ON_COMMIT="inline"),
                django_capture_on_commit_callbacks(execute=True),
            ):
                send_message("tests.q", 1)
            pending = OutboxMessage.objects.filter(dispatched_at=None)
            assert pending.count() == left
            pending.delete()
        assert broker.received("SEND") == []
