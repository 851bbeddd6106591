"""Only messages that have not been sent can be cancelled and rescheduled."""

from __future__ import annotations

import datetime as dt
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import StringIO
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.test import Client
from django.utils import timezone

from django_txmsg import cancel_message, reschedule_message, send_message, signals
from django_txmsg.errors import InvalidMessage
from django_txmsg.models import DeadLetter, OutboxMessage
from django_txmsg.monitoring import retention, status
from django_txmsg.testing import drain
from tests.admin.conftest import somebody  # noqa: F401 - a fixture
from tests.running import committing, declared, ship, txmsg

HOUR = dt.timedelta(hours=1)


@pytest.fixture(autouse=True)
def _nothing_leaves_by_itself() -> Iterator[None]:
    with txmsg():
        yield


def stored(**options: Any) -> uuid.UUID:
    options.setdefault("delay", HOUR)
    with transaction.atomic():
        return send_message("tests.later", {"a": 1}, **options).id


def claim(lease: float = 60.0) -> list[Any]:
    return OutboxMessage.objects.claim(
        broker="default", token=uuid.uuid4(), lease=lease, limit=10
    )


@pytest.mark.django_db
def test_cancelled_message_never_leaves_and_has_no_dead_letter() -> None:
    one, other = stored(), stored()

    assert cancel_message(one, why="paid")
    assert not cancel_message(one)
    OutboxMessage.objects.filter(dispatched_at=None, dead_at=None).update(
        due_at=timezone.now() - HOUR
    )

    assert ship() == 1
    row = OutboxMessage.objects.get(message_id=one)
    assert (row.state, row.last_error) == ("cancelled", "cancelled: paid")
    assert row.cancelled_at is not None
    assert OutboxMessage.objects.get(message_id=other).dispatched_at is not None
    assert not DeadLetter.objects.exists()
    assert not status.read("default").overdue


@pytest.mark.django_db
def test_a_cancelled_message_is_pruned_after_the_retention() -> None:
    cancel_message(stored())
    outbox = next(kind for kind in retention.kinds() if kind.model is OutboxMessage)
    assert sum(retention.prune(outbox, "default")) == 0
    long_ago = timezone.now() - 8 * 24 * HOUR
    OutboxMessage.objects.update(created_at=long_ago, dead_at=long_ago)

    assert sum(retention.prune(outbox, "default")) == 1


@pytest.mark.django_db
def test_sent_and_claimed_messages_cannot_be_cancelled() -> None:
    gone = stored(delay=None)
    ship()
    flying = stored(delay=None)
    assert len(claim()) == 1
    for message_id in (gone, flying, uuid.uuid4()):
        assert not cancel_message(message_id)
        assert not reschedule_message(message_id, delay=HOUR)

    states = OutboxMessage.objects.order_by("id").values_list("dead_at", "last_error")
    assert list(states) == [(None, ""), (None, "")]


@pytest.mark.django_db
def test_row_of_an_ended_lease_can_be_cancelled() -> None:
    one, token = stored(delay=None), uuid.uuid4()
    (row,) = OutboxMessage.objects.claim(
        broker="default", token=token, lease=60, limit=1
    )
    OutboxMessage.objects.update(lease_until=timezone.now() - HOUR)

    assert cancel_message(one)
    assert OutboxMessage.objects.mark_dispatched([row.id], token) == 0
    assert OutboxMessage.objects.get().state == "cancelled"


@pytest.mark.django_db
def test_a_message_leaves_at_its_new_time() -> None:
    one = stored()
    assert reschedule_message(one, delay=dt.timedelta(0))
    assert ship() == 1

    two = stored(delay=None)
    assert reschedule_message(two, delay=HOUR)
    assert ship() == 0
    assert reschedule_message(two, at=timezone.now() - HOUR)
    assert ship() == 1

    three, at = stored(), timezone.now().replace(microsecond=0) + HOUR
    assert reschedule_message(three, at=at)
    assert OutboxMessage.objects.get(message_id=three).due_at == at


@pytest.mark.django_db
def test_a_message_of_a_key_holds_back_its_followers_until_it_is_cancelled() -> None:
    first, _ = stored(key="k", delay=None), stored(key="k", delay=None)

    assert reschedule_message(first, delay=HOUR)
    assert ship() == 0
    assert cancel_message(first)
    assert ship() == 1


@pytest.mark.django_db
def test_linked_message_can_only_be_rescheduled() -> None:
    one = stored(key="k", delay=None)
    OutboxMessage.objects.update(linked_at=timezone.now())

    assert not cancel_message(one)
    assert reschedule_message(one, delay=HOUR)


@committing
def test_a_transaction_that_rolls_back_cancels_nothing() -> None:
    one = stored()
    with suppress(KeyError), transaction.atomic():
        assert cancel_message(one)
        assert reschedule_message(stored(), delay=HOUR)
        raise KeyError

    assert OutboxMessage.objects.get().state == "pending"


@committing
@pytest.mark.postgresql
def test_relay_does_not_claim_a_message_that_is_being_cancelled() -> None:
    one = stored(delay=None)
    claimed: list[Any] = []

    def relay() -> None:
        try:
            claimed.extend(claim())
        finally:
            connections.close_all()

    with transaction.atomic():
        assert cancel_message(one)
        thread = threading.Thread(target=relay)
        thread.start()
        thread.join(60)
    assert claimed == []
    assert claim() == []


@committing
def test_a_message_is_either_claimed_or_cancelled() -> None:
    ids = [stored(delay=None) for _ in range(60)]
    start, claimed = threading.Barrier(2), set[uuid.UUID]()

    def relay() -> None:
        start.wait(30)
        try:
            for _ in range(60):
                rows = OutboxMessage.objects.claim(
                    broker="default", token=uuid.uuid4(), lease=60, limit=1
                )
                claimed.update(uuid.UUID(row.message_id) for row in rows)
        finally:
            connections.close_all()

    thread = threading.Thread(target=relay)
    thread.start()
    start.wait(30)
    cancelled = {one for one in reversed(ids) if cancel_message(one)}
    thread.join(60)

    assert cancelled | claimed == set(ids)
    assert not cancelled & claimed


@committing
def test_rescheduling_to_now_wakes_the_dispatcher_after_the_commit() -> None:
    one, two, woken = stored(), stored(), list[int]()

    def wake(ids: list[int], **_: object) -> None:
        woken.extend(ids)

    signals.messages_committed.connect(wake)
    try:
        with transaction.atomic():
            assert reschedule_message(one, delay=dt.timedelta(0))
            assert reschedule_message(two, delay=dt.timedelta(seconds=1))
            assert woken == []
    finally:
        signals.messages_committed.disconnect(wake)

    assert woken == [OutboxMessage.objects.get(message_id=one).pk]


@pytest.mark.django_db
def test_stage_can_cancel_its_own_message() -> None:
    def handler(message: Any) -> None:
        sent = send_message("tests.next", {})
        assert cancel_message(sent.id)
        send_message("tests.last", {})

    with declared(handler, "tests.later"):
        stored(delay=None)
        drain("tests.later")

    states = {row.destination: row.state for row in OutboxMessage.objects.all()}
    assert states == {
        "tests.later": "dispatched",
        "tests.next": "cancelled",
        "tests.last": "dispatched",
    }


@pytest.mark.django_db(databases=["default", "other"])
def test_another_database_is_named() -> None:
    with transaction.atomic(using="other"):
        one = send_message("tests.later", {}, using="other", delay=HOUR).id

    assert not cancel_message(one)
    assert reschedule_message(one, delay=HOUR, using="other")
    assert cancel_message(one, using="other")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delay": HOUR, "at": timezone.now()},
        {"at": dt.datetime(2030, 1, 1)},
        {"at": "tomorrow"},
        {"at": dt.datetime.max.replace(tzinfo=dt.timezone.utc)},
        {"at": dt.datetime.min.replace(tzinfo=dt.timezone(14 * HOUR))},
        {"delay": -HOUR},
        {"delay": 5},
    ],
)
def test_invalid_time_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidMessage):
        reschedule_message(uuid.uuid4(), **options)


def test_invalid_id_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="UUID"):
        cancel_message("x")  # type: ignore[arg-type]


@pytest.mark.django_db
def test_commands_cancel_reschedule_and_report_failures() -> None:
    one, two, out = stored(), stored(), StringIO()
    call_command("txmsg", "reschedule", str(one), "--delay", "0s", stdout=out)
    call_command("txmsg", "reschedule", str(two), "--at", "2030-01-01T00:00Z")
    assert ship() == 1
    with pytest.raises(CommandError, match=f"Not cancelled.*{one}"):
        call_command("txmsg", "cancel", str(one), str(two), "--why", "x", stdout=out)

    assert f"Rescheduled {one}." in out.getvalue()
    assert f"Cancelled {two}." in out.getvalue()
    assert OutboxMessage.objects.get(message_id=two).last_error.endswith(": x")
    for wrong in (["--at", "soon"], ["--delay", "-1"], ["--delay", "nan"]):
        with pytest.raises(CommandError):
            call_command("txmsg", "reschedule", str(two), *wrong)


@pytest.mark.django_db
@pytest.mark.parametrize("seconds", ["3600", "3599.5"])
def test_delay_without_a_unit_is_in_seconds(seconds: str) -> None:
    one = stored()

    call_command("txmsg", "reschedule", str(one), "--delay", seconds)

    delay = OutboxMessage.objects.get(message_id=one).due_at - timezone.now()
    assert dt.timedelta(minutes=59) < delay <= dt.timedelta(minutes=60)


@pytest.mark.django_db
def test_the_console_cancels_and_reschedules_with_its_permissions(
    somebody: Callable[..., Client],  # noqa: F811 - the fixture
) -> None:
    one, two = stored(), stored()
    page = f"/admin/django_txmsg/outboxmessage/{one}/"
    viewer = somebody("view_outboxmessage")
    assert "Cancel the message" not in viewer.get(page).content.decode()
    assert viewer.post(f"{page}cancel/").status_code == 403
    assert viewer.post(f"{page}reschedule/").status_code == 403
    ada = somebody("view_outboxmessage", "cancel_outboxmessage",
                   "reschedule_outboxmessage")  # fmt: skip
    assert "Cancel the message" in ada.get(page).content.decode()
    assert ada.get(f"{page}cancel/").status_code == 405

    for minutes in ("much", "-1", "1e300", "nan"):
        said = ada.post(f"{page}reschedule/", {"minutes": minutes}, follow=True)
        assert "is not a number of minutes" in said.content.decode()
    ada.post(f"{page}reschedule/", {"minutes": "90"})
    said = ada.post(f"{page}cancel/", {"why": "<b>twice</b>"}, follow=True)
    assert f"Cancelled message {one}: " in said.content.decode()
    assert "&lt;b&gt;twice&lt;/b&gt;" in said.content.decode()
    assert "Cancel the message" not in said.content.decode()
    said = ada.post(f"{page}cancel/", follow=True)
    assert "no longer pending" in said.content.decode()

    assert [entry.change_message for entry in LogEntry.objects.order_by("pk")] == [
        f"Rescheduled message {one}: due in 90 minutes",
        f"Cancelled message {one}: <b>twice</b>",
    ]
    listed = "/admin/django_txmsg/outboxmessage/?state="
    assert str(one) in ada.get(f"{listed}cancelled").content.decode()
    assert str(one) not in ada.get(f"{listed}dead").content.decode()
    assert str(two) in ada.get(f"{listed}pending").content.decode()
