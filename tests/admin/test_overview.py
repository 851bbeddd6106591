"""The app's index page, which the person on call opens first."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_txmsg import stages
from django_txmsg.models import PeriodCount
from django_txmsg.monitoring import periods, status, waiting
from tests import factories

from . import shop

URL = "/admin/django_txmsg/"


def test_an_idle_system_is_well(viewer: Client) -> None:
    factories.WorkerFactory(kind="relay", stages=[])

    page = viewer.get(URL).content.decode()

    assert "All is well." in page
    assert "Attention" not in page


def test_alarms_come_first_with_links(
    viewer: Client, declared: Callable[..., None]
) -> None:
    declared("mail.send")
    factories.OutboxMessageFactory(created_at=factories.ago(minutes=14))
    factories.InboxMessageFactory(parked=True, due_at=factories.ago(minutes=5))
    factories.QueueMessageFactory(available_at=factories.ago(minutes=4))
    factories.DeadLetterFactory(created_at=factories.ago(hours=3))
    factories.WorkerFactory(host="lost-1", heartbeat_at=factories.ago(minutes=3))
    factories.StageStateFactory(stage="payments.charge", paused_by="linus")
    factories.WorkerFactory(stages=["orders.place"])

    page = viewer.get(URL).content.decode()

    assert "All is well." not in page
    order = [
        page.index(text)
        for text in (
            "No consumer runs stage mail.send",
            "in the outbox is overdue",
            "embedded broker waits",
            "1 redelivery is overdue",
            "on lost-1",
            "1 dead letter",
            "Stage payments.charge is paused.",
        )
    ]
    assert order == sorted(order)
    assert "1 message in the outbox is overdue" in page
    assert "14 min" in page
    assert "1 redelivery is overdue" in page
    assert "1 message in the embedded broker" in page
    assert "1 dead letter" in page
    assert "on lost-1" in page
    assert "Stage payments.charge is paused.</a> By linus, " in page
    assert "to orders.place (1)" in page
    assert "No stage here consumes orders.place." in page


def test_the_overdue_count_links_to_the_messages(viewer: Client) -> None:
    tile = 'class="txmsg-tile txmsg-bad" href="/admin/django_txmsg/{}/?state=overdue"'
    factories.InboxMessageFactory(parked=True, due_at=factories.ago(minutes=5))
    assert tile.format("inboxmessage") in viewer.get(URL).content.decode()

    factories.OutboxMessageFactory(created_at=factories.ago(minutes=14))
    assert tile.format("outboxmessage") in viewer.get(URL).content.decode()


def test_destinations_stages_queues_and_workers_have_their_rows(viewer: Client) -> None:
    shop.open_shop(orders=3)
    factories.OutboxMessageFactory(destination="mail.newsletter", attempts=2)
    factories.QueueMessageFactory(queue="orders.place")
    factories.DeadLetterFactory(stage="", destination="mail.newsletter")

    response = viewer.get(URL)

    page = response.content.decode()
    assert "mail.newsletter" in page
    assert "worker-2:" in page
    assert page.index("<h2>Workers</h2>") < page.index("Destinations <small>")
    picture = status.read()
    assert picture.destinations["mail.newsletter"].waiting.retried == 1
    assert picture.destinations["mail.newsletter"].dead == 1
    assert picture.stages["payments.charge"].processing is not None
    assert picture.queues["orders.place"].count == 1


@pytest.mark.parametrize(("rows", "shown"), [(2, 2), (20, 19)])
def test_times_of_a_stage_are_95th_percentiles(
    viewer: Client, rows: int, shown: int
) -> None:
    for seconds in range(1, rows + 1):
        began = factories.ago(hours=1)
        factories.InboxMessageFactory(
            created_at=began,
            started_at=began,
            processed_at=began + dt.timedelta(seconds=seconds),
        )
    [(stage, _, processing, critical)] = status.last_processed("default")

    assert (stage, processing, critical) == ("orders.place", shown, shown)
    assert "Processing <small>p95</small>" in viewer.get(URL).content.decode()


def test_the_chart_counts_each_hour_and_remembers_closed_periods(
    viewer: Client,
) -> None:
    for hours in (1.5, 1.6, 20):
        factories.OutboxMessageFactory(
            created_at=factories.ago(hours=hours), dispatched=True
        )
    factories.OutboxMessageFactory(created_at=factories.ago(hours=30), dispatched=True)
    now = timezone.now()

    first = periods.last_day(now, "default")
    periods.remember("default", now)
    remembered = PeriodCount.objects.count()
    factories.OutboxMessageFactory(created_at=factories.ago(seconds=1))
    second = periods.last_day(timezone.now(), "default")

    assert sum(hour.counts["stored"] for hour in first) == 3
    assert sum(hour.counts["dispatched"] for hour in first) == 3
    assert remembered > 12 * 22
    assert sum(hour.counts["stored"] for hour in second) == 4


@pytest.mark.django_db(databases=["default", "other"])
def test_the_charts_count_every_database(viewer: Client) -> None:
    factories.OutboxMessageFactory()
    factories.OutboxMessageFactory.build().save(using="other")
    stage = stages.Stage("a", "a", handler=lambda message: None, using="other")
    stages.register(stage)
    try:
        charts = viewer.get(URL).context["charts"]
    finally:
        stages.unregister("a")

    assert charts[0]["total"] == 2


def test_remembered_periods_are_not_read_again(db: None) -> None:
    now = timezone.now()
    row = factories.OutboxMessageFactory(created_at=factories.ago(hours=3))
    periods.remember("default", now)

    row.delete()  # as pruning does

    again = periods.last_day(now, "default")
    assert sum(hour.counts["stored"] for hour in again) == 1


def test_without_workers_finished_periods_are_counted_once(db: None) -> None:
    now = timezone.now()
    old = factories.OutboxMessageFactory(created_at=factories.ago(hours=3))
    periods.last_day(now, "default")
    old.delete()  # only a look at its hour would notice
    factories.OutboxMessageFactory(created_at=factories.ago(minutes=2))

    second = periods.last_day(timezone.now(), "default")
    periods.remember("default", now)
    third = periods.last_day(timezone.now(), "default")

    assert sum(hour.counts["stored"] for hour in second) == 2
    assert sum(hour.counts["stored"] for hour in third) == 1
    assert third[-1].start == now.replace(minute=0, second=0, microsecond=0)


def test_a_place_behind_many_newer_rows_is_shown(
    viewer: Client, declared: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only row of a place (a stage or a destination) is not among the newest rows
    that the overview reads. The overview shows the place as soon as a worker has stored
    the place's counts."""
    monkeypatch.setattr(status, "NEWEST", 3)
    declared("parcels.send")
    factories.OutboxMessageFactory(
        destination="parcels.sned", created_at=factories.ago(minutes=9), dispatched=True
    )
    factories.InboxMessageFactory(
        stage="parcels.send", first_received_at=factories.ago(minutes=9)
    )
    factories.OutboxMessageFactory.create_batch(4, dispatched=True)
    factories.InboxMessageFactory.create_batch(4)

    periods.remember("default", timezone.now() + dt.timedelta(minutes=2))
    picture = status.read()

    assert picture.unconsumed == {"parcels.sned": "parcels.send"}
    for places, name in (
        (picture.destinations, "parcels.sned"),
        (picture.stages, "parcels.send"),
    ):
        last = places[name].last
        assert last is not None
        assert abs(picture.now - last) < dt.timedelta(minutes=10)
    page = viewer.get(URL).content.decode()
    assert "parcels.sned" in page
    assert "parcels.send" in page


def test_broker_of_a_destination_is_that_of_its_last_dispatch(db: None) -> None:
    moved = {"destination": "moved", "dispatched": True}
    factories.OutboxMessageFactory(broker="old", **moved)
    last = factories.OutboxMessageFactory(broker="new", **moved)
    factories.OutboxMessageFactory(broker="pending", destination="moved")

    found = status.last_dispatched("default")

    assert found == {"moved": (last.dispatched_at, "new")}


def test_looking_writes_nothing(viewer: Client) -> None:
    factories.OutboxMessageFactory(created_at=factories.ago(hours=3), dispatched=True)

    with CaptureQueriesContext(connection) as asked:
        viewer.get(URL)

    verbs = {one["sql"].split()[0] for one in asked.captured_queries}
    assert verbs <= {"SELECT", "WITH", "SAVEPOINT", "RELEASE"}
    assert not PeriodCount.objects.exists()


def test_each_place_is_counted_to_the_cap_by_itself(
    viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    factories.OutboxMessageFactory.create_batch(7)
    factories.OutboxMessageFactory(
        destination="mail.send", created_at=factories.ago(minutes=9)
    )
    monkeypatch.setattr(waiting, "CAP", 5)

    places = status.read().destinations

    assert (
        places["orders.place"].waiting.count,
        places["mail.send"].waiting.count,
    ) == (
        6,
        1,
    )
    assert places["orders.place"].waiting.capped
    assert not places["mail.send"].waiting.capped
    assert places["mail.send"].waiting.overdue == 1


def test_sections_need_the_right_to_see_their_rows(
    somebody: Callable[..., Client],
) -> None:
    shop.open_shop(orders=1)

    page = somebody("view_worker").get(URL).content.decode()

    assert "<h2>Workers</h2>" in page
    for title in ("Pending", "Overdue", "Redelivering", "Dead", "Processed", "Died"):
        assert title not in page
    assert "what this service sends to" not in page
    assert "what this service consumes" not in page


def test_the_number_of_queries_is_fixed(
    viewer: Client, django_assert_num_queries: Callable[..., object]
) -> None:
    shop.open_shop(orders=2)
    periods.remember("default", timezone.now())
    # PostgreSQL is also asked whether it is read-only.
    queries = QUERIES + (connection.vendor == "postgresql")
    with django_assert_num_queries(queries):
        viewer.get(URL)
    shop.open_shop(orders=30)
    shop.trouble()
    with django_assert_num_queries(queries):
        viewer.get(URL)


#: Session, user and permissions 4; status 17 and the clock; the chart 7.
QUERIES = 29
