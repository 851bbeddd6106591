"""The lake contains runs of flows with their steps and undos, and `reconcile` judges
them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from django_txmsg import Destination, wire
from django_txmsg.flows import Flow, Next, cancel, resume, start, step
from django_txmsg.management.commands.pipeline import source_spec
from django_txmsg.models import (
    Batch,
    FlowStep,
    FlowUndo,
    InboxMessage,
    OutboxMessage,
    Run,
)
from django_txmsg.models.queue import QueueMessage
from django_txmsg.monitoring import retention
from django_txmsg.spark.jobs.flows import LIVE_RUNS, RUN
from django_txmsg.spark.jobs.reading import WholeLog
from django_txmsg.spark.models import Finding
from django_txmsg.spark.schemas import FLOW_RUNS, FLOW_STEPS, FLOW_UNDOS, TABLES
from django_txmsg.spark.spec import JobSpec, LakeSpec
from django_txmsg.testing import drain
from tests.running import IMPATIENT, txmsg
from tests.shelved_flows import at_hand, shelved
from tests.spark.archives import delta_rows, hashes_in, hashes_of_lake
from tests.spark.conftest import committing
from tests.spark.log import UTC, Log
from tests.spark.running import run
from tests.trips import Done, Order, begin, trips, waiting

pytestmark = [committing, pytest.mark.usefixtures("trip")]

FLOWS = (FLOW_STEPS, FLOW_UNDOS, FLOW_RUNS)
_live = pytest.param("live", marks=pytest.mark.matrix)
ALL_AT_ONCE = ("--grace", "0s", "--stuck-after", "0s")


@pytest.fixture
def trip(settings: Any) -> Iterator[None]:
    settings.TXMSG = IMPATIENT
    with trips():
        yield


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    """A job specification with the tests' own database and a lake."""
    lake = LakeSpec(f"file://{tmp_path}/lake")
    return JobSpec((source_spec("default", "tests"),), lake)


def archive(spec: JobSpec) -> dict[str, int]:
    """Archive all settled rows. Return the number of archived rows of each flow
    table."""
    counts = run(spec, "archive", "--older-than", "0s", "--no-vacuum")["counts"]
    return {table.name: counts[table.name] for table in FLOWS}


def judged(spec: JobSpec, *words: str) -> set[tuple[str, str, str]]:
    """Run `reconcile`, and return each finding as verdict, message id and
    destination."""
    run(spec, "reconcile", *ALL_AT_ONCE, *words)
    rows = Finding.objects.values_list("verdict", "message_id", "destination")
    return {(verdict, str(one), place) for verdict, one, place in rows}


def answered(key: str) -> Run:
    found = waiting(key)
    assert found.turn is not None
    with transaction.atomic():
        resume(wire.ticket(found.run_id, found.turn), True)
    return ended(found)


def failed(key: str) -> Run:
    found = waiting(key)
    with transaction.atomic():
        cancel(found, "sold out")
    return ended(found)


def ended(found: Run) -> Run:
    drain()
    found.refresh_from_db()
    assert found.ended_at is not None
    return found


@pytest.mark.matrix
def test_ended_runs_move_to_the_lake_with_their_steps_and_undos(
    spark: Any, spec: JobSpec
) -> None:
    log, lake = Log(spec.service()), spec.lake_spec()
    good, bad, open_ = answered("A-1"), failed("A-2"), waiting("A-3")
    before = {table.name: hashes_in(log, table) for table in FLOWS}
    steps = FlowStep.objects.exclude(run=open_).count()

    assert archive(spec) == {"flow_steps": steps, "flow_undos": 2, "flow_runs": 2}

    assert list(Run.objects.all()) == [open_]
    assert set(FlowStep.objects.values_list("run_id", flat=True)) == {open_.pk}
    for table in FLOWS:
        there = dict(hashes_of_lake(lake, table))
        left = hashes_in(log, table)
        assert there | left == before[table.name], table.name
        assert not there.keys() & left.keys(), table.name
    runs = {row["key"]: row for row in delta_rows(lake, FLOW_RUNS).to_pylist()}
    assert {key: row["outcome"] for key, row in runs.items()} == {
        "A-1": "answered", "A-2": "failed",
    }  # fmt: skip
    assert runs["A-1"]["message_id"] == str(good.run_id)
    assert runs["A-1"]["state"] == good.state
    history = delta_rows(lake, FLOW_STEPS).to_pylist()
    names = [row["step"] for row in history if row["run_id"] == str(good.run_id)]
    assert names == ["start", "booked", "paid", "approved"]
    undos = delta_rows(lake, FLOW_UNDOS).to_pylist()
    assert {row["message_id"] for row in undos} == {str(bad.run_id)}
    assert [row["outcome"] for row in undos] == ["confirmed"] * 2
    assert archive(spec) == dict.fromkeys((table.name for table in FLOWS), 0)
    assert not run(spec, "verify")["problems"]


def test_a_lake_without_bodies_has_no_state_of_a_flow(
    spark: Any, spec: JobSpec
) -> None:
    lake = replace(spec.lake_spec(), keep_bodies=False)
    failed("A-1")

    archive(replace(spec, lake=lake))

    assert not Run.objects.exists()
    rows = [row for table in FLOWS for row in delta_rows(lake, table).to_pylist()]
    personal = ("state", "answer", "baggage", "body")
    assert {row[name] for row in rows for name in personal if name in row} == {None}


def test_with_a_lake_pruning_leaves_runs_to_the_archive(spec: JobSpec) -> None:
    """With a lake, pruning deletes flow batches, but no runs. The archive takes a run
    after its flow batch was pruned. Without a lake, pruning deletes both."""
    run_ = answered("A-1")
    Batch.objects.create(run=run_, turn=run_.run_id, total=0, enough=0)
    kept = {"FLOWS": 0}

    with txmsg(LAKE={"URI": spec.lake_spec().uri}, RETENTION=kept):
        kinds = {kind.model: kind for kind in retention.kinds()}
        assert sum(retention.prune(kinds[Run], "default")) == 0
        assert archive(spec)["flow_runs"] == 0
        assert sum(retention.prune(kinds[Batch], "default")) == 1
        assert archive(spec)["flow_runs"] == 1

    again = answered("A-2")
    Batch.objects.create(run=again, turn=again.run_id, total=0, enough=0)
    with txmsg(RETENTION=kept):
        assert sum(retention.prune(kinds[Run], "default")) == 1
    assert not Batch.objects.exists()


@pytest.mark.matrix
@pytest.mark.parametrize("archived", ["live", "half", "all"])
def test_healthy_runs_have_no_verdict(spark: Any, spec: JobSpec, archived: str) -> None:
    answered("A-1")
    failed("A-2")
    if archived == "half":
        archive(spec)
    waiting("A-3")
    answered("A-4")
    failed("A-5")
    # The undo overtakes its request, which waits in the queue.
    overtaken = begin("A-6")
    drain("acts.trip")
    with transaction.atomic():
        cancel(overtaken, "sold out")
    drain("acts.trip", "acts.trip.steps", "acts.unbook")
    assert QueueMessage.objects.get().queue == "acts.book"
    if archived == "all":
        archive(spec)

    assert judged(spec) == set()


@pytest.mark.parametrize("archived", [_live, "all"])
def test_what_a_flow_has_lost_is_found(
    spark: Any, spec: JobSpec, archived: str
) -> None:
    """Each planted fault gets its verdict, in the database and in the lake. After the
    repair, the verdict is gone."""
    failed("A-0")
    undelivered, forgotten, unasked = answered("A-1"), failed("A-2"), failed("A-3")
    Run.objects.filter(pk=undelivered.pk).update(caller={"txmsg-reply-to": "x.steps"})
    of_pay = FlowUndo.objects.get(run=forgotten, number=2)
    FlowUndo.objects.filter(pk=of_pay.pk).update(confirmed_at=None)
    of_book = FlowUndo.objects.get(run=unasked, number=1)
    OutboxMessage.objects.filter(message_id=of_book.request_id).delete()
    InboxMessage.objects.filter(message_id=of_book.request_id).delete()
    if archived == "all":
        archive(spec)
    # It was paid, and the broker has lost the answer.
    unanswered = begin("A-4")
    drain("acts.trip", "acts.trip.steps", "acts.book", limit=6)
    drain("acts.pay")
    answer = QueueMessage.objects.get(queue="acts.trip.steps")
    lost = answer.headers["txmsg-id"]
    answer.delete()
    # The run undoes its work, and no service receives the undo.
    undoing = waiting("A-5")
    with transaction.atomic():
        cancel(undoing, "sold out")
    drain("acts.trip", "acts.trip.steps")

    found = judged(spec)

    ids = {one[1] for one in found if one[0] not in ("never_received", "in_flight")}
    assert found - {("never_received", lost, "acts.trip.steps")} >= {
        ("unanswered", str(undelivered.run_id), "acts.trip"),
        ("not_undone", str(of_pay.request_id), "acts.unpay"),
        ("undo_without_request", str(of_book.request_id), "acts.unbook"),
        ("unanswered", str(unanswered.run_id), "acts.trip"),
        ("not_undone", str(undoing.run_id), "acts.trip"),
    }
    assert len(ids) >= 5
    if archived == "all":
        assert judged(spec) == found, "the same from the lake again"
        assert judged(spec, "--since", "1s") == found, "whenever they began"
        return
    Run.objects.filter(pk=undelivered.pk).update(caller={})
    FlowUndo.objects.filter(pk=of_pay.pk).update(confirmed_at=of_pay.confirmed_at)
    drain()
    mended = {verdict for verdict, one, _ in judged(spec) if one in ids}
    assert mended <= {"undo_without_request", "unanswered"}


def test_a_run_that_is_stuck_is_found_whenever_it_began(
    spark: Any, spec: JobSpec
) -> None:
    stuck, now = waiting("A-1"), timezone.now()
    Run.objects.filter(pk=stuck.pk).update(
        created_at=now - timedelta(days=3), due_at=now - timedelta(hours=8)
    )

    found = judged(spec, "--since", "24h")

    assert found == {("unanswered", str(stuck.run_id), "acts.trip")}


rent = Destination("acts.rent", Order, reply=Done, foreign=True)
unrent = Destination("acts.unrent", Order, foreign=True)


@shelved
class Renting(Flow[Order, str], name="acts.renting", within=timedelta(days=2)):
    @step
    def start(self, order: Order) -> Next[str]:
        return self.ask(rent, order, then=self.rented, undo=unrent)

    @step
    def rented(self, done: Done) -> Next[str]:
        return done.by


def test_a_run_waits_until_a_foreign_request_has_expired(
    spark: Any, spec: JobSpec
) -> None:
    """The undo of the request is due when the request has expired."""
    with at_hand(Renting):
        with transaction.atomic():
            run_ = start(Renting, Order(1))
        drain("acts.renting", "acts.renting.steps")
        with transaction.atomic():
            cancel(run_, "closed")
        drain("acts.renting", "acts.renting.steps")
    ago = timezone.now() - timedelta(hours=8)
    assert Run.objects.filter(waits_for="undo").update(since=ago)
    words = ("--stuck-after", "6h", "--external", "acts.rent")

    assert judged(spec, *words) == set()

    undo = OutboxMessage.objects.filter(destination="acts.unrent")
    undo.update(created_at=ago, due_at=ago)
    assert {verdict for verdict, *_ in judged(spec, *words)} == {
        "not_undone", "not_sent",
    }  # fmt: skip


@shelved
class Signing(Flow[Order, str], name="acts.signing", within=None):
    @step
    def start(self, order: Order) -> Next[str]:
        return self.wait(then=self.signed)

    @step
    def signed(self, name: str) -> Next[str]:
        return name


@shelved
class Checking(Flow[Order, str], name="acts.checking", within=None):
    @step
    def start(self, order: Order) -> Next[str]:
        return self.hand_over(Signing, order)


@shelved
class Selling(Flow[Order, str], name="acts.selling", within=None):
    @step
    def start(self, order: Order) -> Next[str]:
        return self.ask(Checking, order, then=self.sold)

    @step
    def sold(self, name: str) -> Next[str]:
        return name


@shelved
class Buying(Flow[Order, str], name="acts.buying", within=None):
    @step
    def start(self, order: Order) -> Next[str]:
        return self.ask(Signing, order, then=self.bought)

    @step
    def bought(self, name: str) -> Next[str]:
        return name


def test_a_run_waits_for_the_flow_to_which_the_asked_one_has_handed_over(
    spark: Any, spec: JobSpec
) -> None:
    with at_hand(Signing, Checking, Selling):
        with transaction.atomic():
            start(Selling, Order(1))
        drain()
    outcomes = Run.objects.order_by("flow").values_list("flow", "outcome")
    assert list(outcomes) == [
        ("acts.checking", "handed_over"), ("acts.selling", ""), ("acts.signing", ""),
    ]  # fmt: skip

    assert judged(spec) == set()


def test_an_answer_is_missed_if_the_asked_flow_has_answered_and_is_archived(
    spark: Any, spec: JobSpec
) -> None:
    with at_hand(Signing, Buying):
        with transaction.atomic():
            start(Buying, Order(1))
        drain()
        signing, buying = Run.objects.order_by("-flow")
        assert signing.turn is not None
        with transaction.atomic():
            resume(wire.ticket(signing.run_id, signing.turn), "Ada")
        drain("acts.signing.steps")
    # An operator discards the answer's dead letter.
    QueueMessage.objects.get(queue="acts.buying.steps").delete()
    assert archive(spec)["flow_runs"] == 1

    for words in ((), ("--since", "1h")):
        assert ("unanswered", str(buying.run_id), "acts.buying") in judged(spec, *words)


def test_of_each_flow_one_run_that_has_handed_over_is_read(
    spark: Any, spec: JobSpec
) -> None:
    with at_hand(Signing, Checking):
        with transaction.atomic():
            for key in "abc":
                start(Checking, Order(1), key=key)
        drain()

    with WholeLog(spark, spec) as log:
        rows = log.read("flow_runs", RUN, where=LIVE_RUNS).toArrow().to_pylist()

    flows = sorted(row["flow"] for row in rows)
    assert flows == ["acts.checking"] + ["acts.signing"] * 3


def test_an_archived_run_is_judged_whatever_the_time_zone_of_since(
    spark: Any, spec: JobSpec
) -> None:
    """In UTC, it began on the day before the one that the option names."""
    undelivered, began = answered("A-1"), datetime(2026, 3, 1, 23, 30, tzinfo=UTC)
    Run.objects.filter(pk=undelivered.pk).update(
        caller={"txmsg-reply-to": "x.steps"}, created_at=began
    )
    archive(spec)
    assert not Run.objects.exists()

    found = judged(spec, "--since", "2026-03-02T00:00+01:00")

    assert ("unanswered", str(undelivered.run_id), "acts.trip") in found


def test_erasing_removes_what_an_ended_flow_knew(spark: Any, spec: JobSpec) -> None:
    gone, kept, live = failed("A-1"), failed("A-2"), answered("A-3")
    archive(spec)
    late, open_ = failed("A-1"), waiting("A-3")

    for key in ("A-1", "A-3"):
        run(spec, "erase", "--key", key)

    assert set(Run.objects.all()) == {open_}, "an open run is needed"
    assert not FlowUndo.objects.filter(run_id=late.pk).exists()
    lake = spec.lake_spec()
    assert delta_rows(lake, FLOW_RUNS)["message_id"].to_pylist() == [str(kept.run_id)]
    assert set(delta_rows(lake, FLOW_STEPS)["run_id"].to_pylist()) == {str(kept.run_id)}
    assert set(delta_rows(lake, FLOW_UNDOS)["message_id"].to_pylist()) == {
        str(kept.run_id)
    }
    assert {gone, live}


def test_show_prints_the_steps_of_a_run(spark: Any, spec: JobSpec) -> None:
    found = failed("A-1")
    seen = run(spec, "show", "A-1")["steps"]
    archive(spec)
    again = run(spec, "show", "A-1")["steps"]

    for steps in (seen, again):
        whats = [one["what"] for one in steps]
        assert "run of flow acts.trip began" in whats
        assert "run of flow acts.trip ended: failed" in whats
    assert any(
        f"of run {found.run_id}" in one["what"]
        for one in run(spec, "show", str(found.run_id))["steps"]
    )


def test_the_commands_know_all_tables() -> None:
    from django_txmsg.spark.cli import ARCHIVED

    assert list(ARCHIVED) == list(TABLES)
