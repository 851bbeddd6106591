"""A bulk operation redelivers one message first. If this message fails again, the
operation costs few attempts."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from django_txmsg import Message, RedeliveryPolicy
from django_txmsg.dead_letters import bulk
from django_txmsg.models import AuditEntry, BulkOperation, DeadLetter
from django_txmsg.stages import Stage
from tests import factories
from tests.running import declared, running, ship, step, txmsg

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

#: A message that fails dies at once.
ONCE = RedeliveryPolicy(max_redeliveries=0)


class Handler:
    """A handler that fails until it is repaired, and counts its attempts."""

    def __init__(self, *, mended: bool) -> None:
        self.mended, self.attempts = mended, 0

    def __call__(self, message: Message) -> None:
        self.attempts += 1
        if not self.mended:
            raise ValueError("no stock")


def bury(stage: Stage, count: int, **more: Any) -> list[DeadLetter]:
    made: list[DeadLetter] = factories.DeadLetterFactory.create_batch(
        count, stage=stage.name, destination=stage.destination, **more
    )
    return made


def work(stage: Stage, operation: BulkOperation, rounds: int = 60) -> list[int]:
    """Run a batch of the operation and then the stage, in turns, until the operation
    ends. Return the sizes of the batches."""
    sizes = []
    for _ in range(rounds):
        BulkOperation.objects.update(due_at=factories.ago(seconds=1))
        handled = bulk.work_batch("default")
        operation.refresh_from_db()
        if operation.state != "running":
            break
        if handled:
            sizes.append(handled)
            # Looked at again before the stage had its turn, it only waits.
            BulkOperation.objects.update(due_at=factories.ago(seconds=1))
            assert bulk.work_batch("default") == 0 or handled > 100
        step(stage, handled or 1)
    return sizes


@pytest.mark.django_db
def test_a_number_beyond_the_column_tolerates_as_many_as_it_can() -> None:
    operation = bulk.start("redeliver", {}, tolerates=10**12)
    assert operation.tolerates == 2**31 - 1


@pytest.mark.parametrize(("tolerates", "attempts"), [(0, 1), (5, 6)])
def test_a_cause_that_is_not_mended_costs_few_attempts(
    tolerates: int, attempts: int, admin_client: Client
) -> None:
    handler = Handler(mended=False)
    with txmsg(), declared(handler, redelivery=ONCE) as stage:
        bury(stage, 60)
        operation = bulk.start("redeliver", {}, tolerates=tolerates)
        work(stage, operation)

        assert (operation.state, handler.attempts) == ("paused", attempts)
        assert DeadLetter.objects.filter(resolution="open").count() == 60
        page = admin_client.get(
            f"/admin/django_txmsg/bulkoperation/{operation.pk}/change/"
        ).content.decode()
        assert "It has stopped itself." in page
        assert f"{attempts} of {attempts} redelivered messages died again" in page

        # The operator goes on with all of the rest.
        handler.mended = True
        BulkOperation.objects.resume(operation.pk)
        bulk.finish(operation)
        assert operation.done == 60
        assert operation.stopped_why == ""


def test_once_the_cause_is_mended_all_go() -> None:
    handler = Handler(mended=True)
    with txmsg(), declared(handler, redelivery=ONCE) as stage:
        bury(stage, 130)
        bury(stage, 3, discarded=True)
        operation = bulk.start("redeliver", {}, tolerates=0)
        sizes = work(stage, operation)

    assert sizes == [1, 10, 100, 19]
    assert (operation.state, operation.done) == ("done", 130)
    assert handler.attempts >= 111


def test_another_error_of_the_message_is_a_death_too() -> None:
    handler = Handler(mended=False)
    with txmsg(), declared(handler, redelivery=ONCE) as stage:
        bury(stage, 20, fingerprint="a" * 16, reason="failed")
        operation = bulk.start("redeliver", {"fingerprint": "a" * 16}, tolerates=0)
        work(stage, operation)

    assert (operation.state, handler.attempts) == ("paused", 1)


def test_a_later_death_stops_the_rest_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "STEPS", (1, 10))
    handler = Handler(mended=True)
    with txmsg(), declared(handler, redelivery=ONCE) as stage:
        bury(stage, 16)
        operation = bulk.start("redeliver", {}, tolerates=0)
        for size in (1, 10, 5):
            BulkOperation.objects.update(due_at=factories.ago(seconds=1))
            assert bulk.work_batch("default") == size
            handler.mended = size != 5
            step(stage, size)
        bulk.work_batch("default")

    operation.refresh_from_db()
    assert (operation.state, operation.done) == ("paused", 16)
    assert operation.stopped_why.startswith("5 of 16")


def test_deaths_of_letters_that_another_operator_redelivered_do_not_count() -> None:
    """Another operator redelivers a message of another error, which dies again."""
    handler = Handler(mended=True)
    with txmsg(), declared(handler, redelivery=ONCE) as stage:
        (other,) = bury(stage, 1, fingerprint="b" * 16)
        bury(stage, 20, fingerprint="a" * 16)
        operation = bulk.start("redeliver", {"fingerprint": "a" * 16}, tolerates=0)
        assert bulk.work_batch("default") == 1
        step(stage)
        handler.mended = False
        bulk.finish(bulk.start("redeliver", {"ids": [other.pk]}))
        step(stage)
        other.refresh_from_db()
        assert (other.resolution, other.deaths) == ("open", 2)
        handler.mended = True
        work(stage, operation)

    assert (operation.state, operation.done) == ("done", 20)


def test_message_that_goes_to_its_queue_is_waited_for_until_its_dispatch() -> None:
    """No process declares the stage any more, so the consumer of its queue may belong
    to another service."""
    with txmsg():
        for letter in factories.DeadLetterFactory.create_batch(20, stage="tests.gone"):
            factories.InboxMessageFactory(
                stage=letter.stage, message_id=letter.message_id, dead=True
            )
        operation = bulk.start("redeliver", {}, tolerates=0)
        assert bulk.work_batch("default") == 1
        for dispatched in (False, True):
            if dispatched:
                assert ship() == 1
            BulkOperation.objects.update(due_at=factories.ago(seconds=1))
            assert bulk.work_batch("default") == (10 if dispatched else 0)
        assert BulkOperation.objects.get(pk=operation.pk).done == 11


def test_page_and_command_ask_for_it_and_leave_it_in_the_audit(
    admin_client: Client,
) -> None:
    with txmsg(), declared(Handler(mended=False), redelivery=ONCE) as stage:
        bury(stage, 2)
        page = "/admin/django_txmsg/deadletter/confirm/"
        asked = admin_client.get(page, {"kind": "redeliver"}).content.decode()
        assert 'name="first"' in asked
        discard = admin_client.get(page, {"kind": "discard"}).content.decode()
        assert 'name="first"' not in discard
        admin_client.post(page, {"kind": "redeliver", "first": "1", "tolerates": "3"})
        operation = BulkOperation.objects.get()
        assert (operation.tolerates, operation.state) == (3, "running")
        BulkOperation.objects.cancel(operation.pk)

    (entry,) = AuditEntry.objects.all()
    assert entry.text == "Redeliver 2 dead letters, one first; filter: all."


def test_the_command_waits_for_the_first_and_says_that_it_stopped() -> None:
    handler = Handler(mended=False)
    with txmsg(), declared(handler, redelivery=ONCE) as stage:
        bury(stage, 30)
        with (
            running(stage),
            pytest.raises(CommandError, match="has stopped itself: 1 of 1"),
        ):
            call_command("dead_letters", "redeliver", "--all", "--one-first")

    assert handler.attempts == 1
    assert DeadLetter.objects.filter(resolution="open").count() == 30
