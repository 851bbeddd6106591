"""Every report shows the same numbers of waiting and dead messages.

The tests compare the numbers with plain SQL, for many kinds and numbers of rows.
"""

from __future__ import annotations

import datetime as dt
import json
import random
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import OperationalError, connection, connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_txmsg import every, health, stages
from django_txmsg.admin.groups import grouped

# Imported before a test changes the cap: else the command keeps the changed one.
from django_txmsg.management.commands import message_status
from django_txmsg.metrics import Collector
from django_txmsg.models import (
    AuditEntry,
    DeadLetter,
    FailureNote,
    InboxMessage,
    OutboxMessage,
    QueueMessage,
    Run,
    Schedule,
    StageState,
    Worker,
)
from django_txmsg.monitoring import alarms, alerting, status, waiting
from tests import factories
from tests.factories import ago
from tests.forgetting import forget_recurring

pytestmark = pytest.mark.django_db(databases=["default", "other"])

OVERVIEW = "/admin/django_txmsg/"
BOTH = ("default", "other")
MUTED = "a" * 16

Counts = dict[tuple[str, str], int]


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    """Declare a stage that uses the second database."""
    one = stages.Stage(
        "elsewhere", "elsewhere", handler=lambda message: None, using="other"
    )
    stages.register(one)
    patient = {"silent_after": dt.timedelta(hours=1)}
    factories.WorkerFactory(kind="relay", stages=[], **patient)
    names = [one.name for one in stages.all_stages()]
    factories.WorkerFactory(stages=names, **patient)
    yield
    stages.unregister("elsewhere")


def told(*options: str) -> tuple[dict[str, Any], int]:
    """Return the `message_status --json` output, and the exit code."""
    out = StringIO()
    try:
        call_command("message_status", "--json", *options, stdout=out)
    except SystemExit as ended:
        return json.loads(out.getvalue()), int(str(ended.code))
    return json.loads(out.getvalue()), 0


def gauges(name: str) -> Counts:
    """Return the values of a metric by database and place. A place is a stage or a
    destination. Zeros are left out."""
    found = {
        (sample.labels["database"], sample.labels.get("stage", "")
         or sample.labels.get("destination", "")): int(sample.value)
        for family in Collector().collect()
        for sample in family.samples
        if family.name == f"txmsg_{name}"
    }  # fmt: skip
    return {place: number for place, number in found.items() if number}


def counted(sql: str) -> Counts:
    """Run a query in both databases, and return its counts by database and place."""
    found: Counts = {}
    for alias in BOTH:
        with connections[alias].cursor() as cursor:
            cursor.execute(sql)
            found |= {(alias, place): number for place, number in cursor.fetchall()}
    return found


def among(places: dict[str, Any], read: Callable[[Any], int]) -> Counts:
    """Call `read` for each place, for example for each stage of a status. Return the
    numbers that are not zero, by database and place."""
    found = {(one.database, one.name): read(one) for one in places.values()}
    return {place: number for place, number in found.items() if number}


def in_facts(section: str, number: str) -> Counts:
    """Read a section of the `message_status --json` output, which has several numbers
    for each place. Return the number that is named `number`, by database and place.
    Zeros are left out."""
    facts, _ = told()
    return {
        (one["database"], one["name"]): one[number]
        for one in facts[section].values()
        if one[number]
    }


OPEN = "FROM django_txmsg_deadletter WHERE resolution = 'open'"
NOTED = (
    "SELECT fingerprint FROM django_txmsg_failurenote note WHERE muted AND"
    " (muted_until IS NULL OR muted_until > CURRENT_TIMESTAMP) AND (muted_above IS NULL"
    f" OR muted_above >= (SELECT COUNT(*) {OPEN} AND"
    " django_txmsg_deadletter.fingerprint = note.fingerprint))"
)


def served() -> Counts:
    """Return how many processes with a recent heartbeat run each declared stage."""
    now, found = ago(), Counter()
    for worker in Worker.objects.all():
        if worker.heartbeat_at + worker.silent_after > now:
            found.update(worker.stages)
    return {
        (one.definition.using, one.name): found[one.name]
        for one in stages.all_stages()
        if found[one.name]
    }


def agree() -> None:
    """Check that every report agrees with plain SQL."""
    picture = status.read()
    for loud, read, gauge, fact in (
        ("NOT", lambda one: one.dead, "dead", "dead"),
        ("", lambda one: one.muted, "muted", "muted"),
    ):
        for column, places, kind, section, where in (
            ("stage", picture.stages, "stage", "stages", "stage <> ''"),
            ("destination", picture.destinations, "outbox", "destinations",
             "stage = ''"),
        ):  # fmt: skip
            expected = counted(
                f"SELECT {column}, COUNT(*) {OPEN} AND {where} AND fingerprint"
                f" {loud} IN ({NOTED}) GROUP BY {column}"
            )
            assert among(places, read) == expected
            assert gauges(f"{kind}_{gauge}") == expected
            assert in_facts(section, fact) == expected
    working = served()
    assert among(picture.stages, lambda one: one.workers) == working
    assert gauges("stage_workers") == working
    assert in_facts("stages", "workers") == working
    blocked = {
        at: min(number, waiting.CAP + 1)
        for at, number in counted(
            "SELECT stage, COUNT(*) FROM django_txmsg_inboxmessage"
            " WHERE waits_for IS NOT NULL GROUP BY stage"
        ).items()
    }
    assert among(picture.stages, lambda one: one.line.count) == blocked
    assert gauges("stage_blocked") == blocked
    assert in_facts("stages", "blocked") == blocked
    ordered = health.look().get("ordered", {"waiting": 0})
    assert ordered["waiting"] == sum(blocked.values())
    paused = set(StageState.objects.values_list("stage", flat=True))
    bound = ago(minutes=2)
    pending = {"dispatched_at": None, "dead_at": None}
    retrying = {"due_at__isnull": False, "needs_version": None, "waits_for": None}
    overdue = {}
    for kind, places, model, place, condition in (
        ("outbox", picture.destinations, OutboxMessage, "destination", pending),
        ("redelivery", picture.stages, InboxMessage, "stage", retrying),
        ("queue", picture.queues, QueueMessage, "queue", {}),
    ):
        column = "available_at" if kind == "queue" else "due_at"
        late: Counts = {}
        for alias in BOTH:
            rows = model._default_manager.using(alias).filter(
                **condition, **{f"{column}__lte": bound}
            )
            for name in rows.values_list(place, flat=True):
                if kind != "redelivery" or name not in paused:
                    late[alias, name] = late.get((alias, name), 0) + 1
        late = {at: min(number, waiting.CAP + 1) for at, number in late.items()}
        read = (lambda one: one.overdue) if kind == "queue" else (
            lambda one: one.waiting.overdue
        )  # fmt: skip
        assert among(places, read) == late, kind
        assert gauges(f"{kind}_overdue") == late
        section = {"outbox": "destinations", "redelivery": "stages", "queue": "queues"}
        assert in_facts(section[kind], "overdue") == late
        overdue[kind] = sum(late.values())
    total = sum(overdue.values())
    facts, code = told()
    loud_ones = sum(one["dead"] for one in facts["stages"].values()) + sum(
        one["dead"] for one in facts["destinations"].values()
    )
    assert facts["overdue"] == picture.overdue == total
    assert facts["dead"]["count"] == picture.dead == loud_ones
    assert (health.look()["status"] == "ok") == (not total)
    raised = {alarm.kind for alarm in alarms.of(picture)}
    assert ("overdue" in raised, "dead" in raised) == (bool(total), bool(loud_ones))
    assert code == int(bool(total))
    lost = len(picture.attendance.lost)
    bad = int(bool(total or loud_ones or lost))
    assert told("--fail-on", message_status.BAD)[1] == bad
    assert told("--fail-on", "silent")[1] == int(bool(lost))
    assert told("--fail-on", "paused")[1] == int(bool(paused))
    assert told("--fail-on", "dead")[1] == int(bool(loud_ones))
    assert alarms.well(picture) == (not bad and not paused)
    for alias in BOTH:
        groups = {one["fingerprint"]: one["count"] for one in grouped(alias)}
        by_error = f"SELECT fingerprint, COUNT(*) {OPEN} GROUP BY fingerprint"
        found = counted(by_error)
        assert groups == {at[1]: n for at, n in found.items() if at[0] == alias}


@pytest.mark.parametrize("seed", range(8))
def test_all_reports_equal_plain_sql_counts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(waiting, "CAP", chance.choice([2, 5, 50]))
    factories.FailureNoteFactory(fingerprint=MUTED, muted=True)
    with_note = factories.FailureNoteFactory.build(fingerprint="b" * 16, muted=True)
    with_note.save(using="other")
    factories.FailureNoteFactory(
        fingerprint="d" * 16, muted=True, muted_above=chance.randint(0, 3)
    )
    factories.FailureNoteFactory(
        fingerprint="e" * 16, muted=True, muted_until=ago(hours=chance.choice([-1, 1]))
    )
    names = [one.name for one in stages.all_stages()]
    for _ in range(chance.randint(0, 4)):
        factories.WorkerFactory(
            stages=chance.sample(names, chance.randint(1, len(names))),
            heartbeat_at=ago(minutes=chance.choice([0, 20])),
            silent_after=dt.timedelta(minutes=10),
        )
    if chance.random() < 0.5:
        factories.StageStateFactory(stage="place-3")
    for _ in range(chance.randint(0, 60)):
        alias, place = chance.choice(BOTH), f"place-{chance.randint(0, 9)}"
        due = ago(seconds=chance.choice([-3600, 30, 600, 90_000]))
        one: Any
        kind = chance.randint(0, 4)
        if kind == 0:
            one = factories.OutboxMessageFactory.build(
                destination=place, due_at=due, service=chance.choice(["shop", "bank"])
            )
        elif kind == 1:
            newer = chance.choice([{}, {}, {"needs_type": "x", "needs_version": 2}])
            one = factories.InboxMessageFactory.build(
                stage=place, parked=True, due_at=due, **newer
            )
            if newer:
                one.first_received_at = ago(minutes=1)
        elif kind == 2:
            one = factories.QueueMessageFactory.build(queue=place, available_at=due)
        elif kind == 3:
            one = factories.InboxMessageFactory.build(
                stage=place, parked=True, due_at=due, key="k", after_at=due,
                waits_for=uuid.uuid4(), waits_since=ago(seconds=5),
            )  # fmt: skip
        else:
            one = factories.DeadLetterFactory.build(
                stage=chance.choice([place, ""]),
                destination=place,
                fingerprint=chance.choice([one * 16 for one in "abcde"]),
            )
        one.save(using=alias)
    agree()


def flood(number: int, **columns: Any) -> None:
    """Park `number` messages at one place."""
    InboxMessage.objects.bulk_create(
        factories.InboxMessageFactory.build_batch(number, parked=True, **columns)
    )


def test_a_muted_flood_hides_no_other_dead_letter() -> None:
    factories.FailureNoteFactory(fingerprint=MUTED, muted=True)
    factories.DeadLetterFactory(stage="b", fingerprint="b" * 16)
    one = factories.DeadLetterFactory(stage="a", fingerprint=MUTED)
    names = [f'"{f.column}"' for f in one._meta.concrete_fields if f.column != "id"]
    columns = ", ".join(names)
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO django_txmsg_deadletter"
            f" ({columns}) WITH RECURSIVE n (i) AS"
            " (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 59999)"
            f" SELECT {columns} FROM django_txmsg_deadletter, n WHERE id = %s",
            [one.pk],
        )

    agree()
    picture = status.read()
    assert (picture.dead, picture.muted) == (1, 60_000)


def test_a_flood_at_one_stage_hides_no_overdue_message_of_another(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "CAP", 500)
    factories.InboxMessageFactory(stage="b", parked=True, due_at=ago(hours=9))
    flood(600, stage="a", due_at=ago(hours=-1))
    flood(2_000, stage="b", needs_type="x", needs_version=2, due_at=ago(hours=10),
          first_received_at=ago(minutes=1))  # fmt: skip

    picture = status.read()

    assert picture.stages["a"].waiting.capped
    assert picture.stages["b"].waiting.overdue == 1
    assert gauges("redelivery_overdue") == {("default", "b"): 1}
    assert told()[1] == 1
    assert client.get("/txmsg/health/").json()["status"] == "stuck"


def test_another_database_is_in_every_answer_by_its_name(
    client: Client, admin_client: Client
) -> None:
    late = factories.OutboxMessageFactory.build(created_at=ago(hours=9))
    late.save(using="other")
    factories.DeadLetterFactory.build(stage="elsewhere").save(using="other")

    page = admin_client.get(OVERVIEW).content.decode()
    facts, code = told()
    answer = client.get("/txmsg/health/").json()

    assert "1 message in the outbox is overdue" in page
    assert "orders.place in other (1)" in page
    assert "1 in database other" in page
    assert code == 1
    assert facts["databases"] == ["default", "other"]
    assert facts["destinations"]["orders.place in other"]["overdue"] == 1
    assert answer["status"] == "stuck"
    assert answer["databases"] == {
        "default": 0.0,
        "other": pytest.approx(32400, abs=90),
    }
    assert gauges("outbox_overdue") == {("other", "orders.place"): 1}
    assert gauges("stage_dead") == {("other", "elsewhere"): 1}


def test_a_database_that_does_not_answer_is_named_and_the_others_are_counted(
    client: Client, admin_client: Client
) -> None:
    factories.OutboxMessageFactory(created_at=ago(minutes=5))

    def refuse(*_: Any) -> Any:
        raise OperationalError("it is away")

    with connections["other"].execute_wrapper(refuse):
        page = admin_client.get(OVERVIEW).content.decode()
        facts, code = told()
        answer = client.get("/txmsg/health/")
        never = client.get("/txmsg/health/?fail=never")
        away = gauges("database_unreadable")

    assert "Database other does not answer" in page
    assert "1 message in the outbox is overdue" in page
    assert (facts["unreadable"], code) == ({"other": "it is away"}, 1)
    assert answer.json()["databases"]["other"] == "no answer"
    assert (answer.status_code, answer.json()["status"]) == (503, "stuck")
    assert never.status_code == 200
    assert away == {("other", ""): 1}


@contextmanager
def refused(part: str) -> Iterator[None]:
    """Refuse the statements in "other" that contain `part`."""

    def refuse(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        if part in sql:
            raise OperationalError("it is away")
        return execute(sql, *rest)

    with connections["other"].execute_wrapper(refuse):
        yield


def test_database_that_fails_while_runs_are_counted_is_reported() -> None:
    with refused("failing"):  # a run that undoes its work
        found = health.look()

    assert (found["status"], found["databases"]["other"]) == ("stuck", "no answer")


def test_database_that_fails_while_sessions_are_counted_is_reported() -> None:
    with refused("django_txmsg_sessionrecord"):
        facts, code = told()

    assert (facts["unreadable"], code) == ({"other": "it is away"}, 1)


def test_stage_with_a_refused_subscription_has_no_consumer(
    client: Client,
) -> None:
    refused = [
        {
            "kind": "the subscription of stage",
            "name": "elsewhere",
            "seconds": 300.0,
            "error": "access refused",
        }
    ]
    worker = factories.WorkerFactory._meta.model.objects.get(kind="consumer")
    worker.outages = refused
    worker.save()

    picture = status.read()

    assert picture.unattended == ["elsewhere"]
    assert picture.stages["elsewhere in other"].workers == 0
    assert client.get("/txmsg/health/").json()["status"] == "degraded"


@pytest.mark.parametrize(
    ("began", "missing"), [(-30.0, False), (200.0, False), (3600.0, True)]
)
def test_a_killed_process_that_was_replaced_is_not_missed(
    began: float, missing: bool
) -> None:
    """A process was killed. Another process of the same stage started after the kill,
    or shortly before it, as in a rolling update. The new process counts as the
    replacement, so the killed process is not reported as missing."""
    ended = ago(minutes=20)
    factories.WorkerFactory(
        name="killed", stages=["x"], heartbeat_at=ended, started_at=ago(days=2)
    )
    factories.WorkerFactory(
        stages=["x"], started_at=ended - dt.timedelta(seconds=began)
    )

    lost = status.read().attendance.lost

    assert [one.name for one in lost] == (["killed"] if missing else [])
    emitted = {
        sample.labels["worker"]
        for family in Collector().collect()
        for sample in family.samples
        if family.name == "txmsg_worker_heartbeat_age_seconds"
    }
    assert ("killed" in emitted) == missing


def test_one_replacement_stands_for_one_process() -> None:
    for number in range(2):
        factories.WorkerFactory(
            name=f"killed-{number}",
            stages=["x"],
            heartbeat_at=ago(minutes=20),
            started_at=ago(days=2),
        )
    factories.WorkerFactory(stages=["x"], started_at=ago(minutes=19))

    assert len(status.read().attendance.lost) == 1


def test_a_mute_does_not_hide_more_than_it_allows(admin_client: Client) -> None:
    url = "/admin/django_txmsg/deadletter/"
    factories.DeadLetterFactory.create_batch(2, fingerprint=MUTED)
    note = {"fingerprint": MUTED, "muted": "1", "note": "Ticket 7.", "above": "3"}
    admin_client.post(f"{url}note/", note)
    factories.DeadLetterFactory(fingerprint=MUTED, stage="mail.send")
    facts, _ = told("--fail-on", "dead")
    assert (facts["dead"]["count"], facts["dead"]["muted"]) == (0, 3)
    assert ">muted<" in admin_client.get(url).content.decode()

    factories.DeadLetterFactory(fingerprint=MUTED)

    facts, code = told("--fail-on", "dead")
    assert (facts["dead"]["count"], facts["dead"]["muted"], code) == (4, 0, 1)
    assert sum(gauges("stage_dead").values()) == 4
    page = admin_client.get(url).content.decode()
    assert "more than the 3 that are muted" in page
    # A change of the note keeps the mute.
    assert 'name="muted" value="1" checked' in page
    assert "<option selected>ever</option>" in page
    assert f"auditentry/?q={MUTED}" in page
    out = StringIO()
    call_command("dead_letters", "groups", stdout=out)
    assert "(muted)" not in out.getvalue()
    (entry,) = AuditEntry.objects.all()
    assert entry.text == f"Muted up to 3 open failures {MUTED}: Ticket 7."
    mute = ("dead_letters", "mute", "--fingerprint", MUTED, "--above")
    call_command(*mute, "4", stdout=out)
    assert told()[0]["dead"]["muted"] == 4


def test_dead_letter_of_the_broker_is_not_one_of_the_relay(
    admin_client: Client,
) -> None:
    places = {"broker": "broker of mail.send", "expired": "relay to mail.send"}
    for reason in places:
        factories.DeadLetterFactory(
            stage="", destination="mail.send", reason=reason, fingerprint=reason
        )

    found = {one["fingerprint"]: list(one["places"]) for one in grouped("default")}
    assert found == {reason: [place] for reason, place in places.items()}
    alerts = alerting.wanted(status.read(), ["dead"])
    page = admin_client.get("/admin/django_txmsg/auditentry/changes/").content.decode()
    rows = admin_client.get("/admin/django_txmsg/deadletter/").content.decode()
    out = StringIO()
    call_command("dead_letters", "list", stdout=out)
    for reason, place in places.items():
        assert f"dead/{reason} {place}" in alerts
        assert f">{place}<" in page
        assert place in rows
        assert f"  {place} " in out.getvalue()
        letter = DeadLetter.objects.get(reason=reason)
        shown = admin_client.get(
            reverse("admin:django_txmsg_message", args=[letter.message_id])
        )
        text = shown.content.decode()
        assert f"</span> {place}</dd>" in text
        assert ("The broker dead-lettered it" in text) == (reason == "broker")
    assert gauges("outbox_dead") == {("default", "mail.send"): 2}


def test_a_stages_letter_whose_message_the_broker_gave_up(admin_client: Client) -> None:
    letter = factories.DeadLetterFactory(stage="orders", reason="broker")
    url = reverse("admin:django_txmsg_message", args=[letter.message_id])
    text = admin_client.get(url).content.decode()
    assert "The broker dead-lettered it at stage orders," in text
    assert "gave up" not in text


def test_a_mute_ends_by_itself(admin_client: Client) -> None:
    letter = factories.DeadLetterFactory(fingerprint=MUTED)
    note = {"fingerprint": MUTED, "note": "until noon", "muted": "1", "for": "8 hours"}
    admin_client.post("/admin/django_txmsg/deadletter/note/", note)
    kept = FailureNote.objects.get()
    assert kept.muted_until is not None
    assert 7.9 < (kept.muted_until - ago()).total_seconds() / 3600 < 8.1
    agree()
    assert (status.read().dead, status.read().muted) == (0, 1)
    page = admin_client.get("/admin/django_txmsg/deadletter/").content.decode()
    assert "ends" in page
    # A change of the note keeps the end.
    (lasts,) = re.findall(r'<option value="(\w+)" selected>until ', page)
    note |= {"note": "until noon, ticket 7", "for": lasts}
    admin_client.post("/admin/django_txmsg/deadletter/note/", note)
    changed = FailureNote.objects.get()
    assert changed.note == "until noon, ticket 7"
    assert changed.muted_until is not None
    assert abs((changed.muted_until - kept.muted_until).total_seconds()) < 30

    FailureNote.objects.update(muted_until=ago(seconds=1))

    page = admin_client.get("/admin/django_txmsg/deadletter/").content.decode()
    assert " checked" not in page
    assert (status.read().dead, status.read().muted) == (1, 0)
    assert [one["muted"] for one in grouped("default")] == [False]
    out = StringIO()
    call_command("dead_letters", "groups", "--json", stdout=out)
    assert [one["muted"] for one in json.loads(out.getvalue())] == [False]
    call_command(
        "dead_letters", "mute", "--fingerprint", letter.fingerprint, "--for", "2d",
        stdout=out,
    )  # fmt: skip
    assert status.read().muted == 1
    call_command(
        "dead_letters", "unmute", "--fingerprint", letter.fingerprint, stdout=out
    )
    assert FailureNote.objects.get().muted_until is None


def check_overdue(what: str, gauge: str, *, state: str) -> None:
    """Check that every report shows exactly one overdue thing, with the name `what`."""
    picture = status.read()
    found = [str(one) for one in alarms.of(picture) if one.kind == "overdue"]
    facts, code = told()
    rows = [
        (sample.value, sample.labels["database"])
        for family in Collector().collect()
        for sample in family.samples
        if sample.name == f"txmsg_{gauge}" and what in sample.labels.values()
    ]
    assert len(found) == 1, found
    assert what in found[0]
    assert (picture.overdue, alarms.well(picture)) == (1, False)
    assert (facts["overdue"], facts["well"], code) == (1, False, 1)
    assert rows == [(1.0, "other")]
    assert health.look()["status"] == state


def test_running_redelivery_is_not_due_and_hides_none_that_is() -> None:
    def parked(**columns: Any) -> None:
        factories.InboxMessageFactory(stage="a", parked=True, **columns)

    parked(due_at=ago(hours=1), lease_until=ago(minutes=-1), lease_token=uuid.uuid4())
    assert not health.look()["oldest"]["redelivery"]
    assert (status.read().overdue, status.read().parked.in_flight) == (0, 1)

    # The handler's transaction locks the row, so the lease is not renewed.
    parked(
        due_at=ago(hours=1), lease_until=ago(minutes=50), lease_token=uuid.uuid4(),
        message_id=(running := uuid.uuid4()),
    )  # fmt: skip
    assert status.read().overdue == 1
    worker = factories.WorkerFactory(
        running=[
            {"thread": "t", "stage": "a", "message": str(running), "attempt": 2,
             "seconds": 3060}
        ],
    )  # fmt: skip
    assert not health.look()["oldest"]["redelivery"]
    assert (status.read().overdue, status.read().parked.in_flight) == (0, 2)

    # A message of a topic: another stage waits for its own attempt.
    other = factories.InboxMessageFactory(
        stage="b", parked=True, due_at=ago(hours=1), message_id=running
    )
    assert health.look()["oldest"]["redelivery"] > 59 * 60
    assert (status.read().overdue, status.read().parked.in_flight) == (1, 2)
    other.delete()

    parked(due_at=ago(minutes=20))
    found = health.look()["oldest"]["redelivery"]
    assert found == pytest.approx(20 * 60, abs=60)
    assert status.read().overdue == 1

    Worker.objects.filter(pk=worker.pk).update(heartbeat_at=ago(minutes=40))
    assert status.read().overdue == 2


def test_a_recurring_message_that_is_not_stored_is_overdue(
    admin_client: Client,
) -> None:
    every("0 3 * * *", "reports.nightly", {}, tz="UTC", using="other")
    rows = Schedule.objects.using("other")
    try:
        rows.create(
            service="tests",
            name="reports.nightly",
            timing="0 3 * * * UTC",
            last_tick=ago(days=2),
        )

        check_overdue("reports.nightly", "recurring_overdue", state="late")
        assert "All is well" not in admin_client.get(OVERVIEW).content.decode()

        rows.update(paused_at=ago(days=1))
        assert alarms.well(status.read())
        assert told()[1] == 0
    finally:
        forget_recurring("reports.nightly")


def test_a_flow_whose_time_out_is_not_stored_is_overdue(admin_client: Client) -> None:
    runs = Run.objects.using("other")
    run = uuid.uuid4()
    runs.create(
        run_id=run, first_run=run, service="shop", flow="orders", version=1, state="{}",
        step="end", turn=uuid.uuid4(), due_at=ago(minutes=12),
    )  # fmt: skip

    check_overdue("shop", "deadline_overdue", state="degraded")
    page = admin_client.get(OVERVIEW).content.decode()
    assert "1 deadline of flows has passed" in page
    assert "All is well" not in page

    runs.update(due_at=ago(minutes=-12))
    assert alarms.well(status.read())


def test_a_run_that_is_stuck_at_an_undo_is_an_alarm_everywhere(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, undo = Run.objects.using("other"), uuid.uuid4()
    for number in range(3):
        run = uuid.uuid4()
        runs.create(
            run_id=run, first_run=run, service="shop", flow="orders", version=1,
            state="{}", step="end", turn=uuid.uuid4(), failing=number > 0,
            waits_for="undo" if number else "answer",
            request_id=undo if number == 1 else uuid.uuid4(),
        )  # fmt: skip
    assert alarms.well(status.read())
    assert "stuck_undos" not in health.look()

    letter = factories.DeadLetterFactory.build(message_id=undo, stage="elsewhere")
    letter.save(using="other")

    picture, (facts, code) = status.read(), told("--fail-on", "undo-stuck")
    (alarm,) = (one for one in alarms.of(picture) if one.kind == "undo-stuck")
    assert str(alarm).startswith(
        "1 run of flow orders is stuck at an undo, of 2 that are undoing their work. "
        "Redeliver its dead letter. Discard it only if its reason is undo_in_doubt."
    )
    assert (alarms.well(picture), code) == (False, 1)
    counts = {"open": 3, "undoing": 2, "undo_stuck": 1}
    assert facts["flows"] == {"orders of shop": counts}
    labels = {"flow": "orders", "service": "shop", "database": "other"}
    assert {
        sample.name: sample.value
        for family in Collector().collect()
        for sample in family.samples
        if sample.labels == labels
    } == {f"txmsg_flow_{name}": number for name, number in counts.items()}
    found = health.look()
    assert (found["stuck_undos"], found["status"]) == (1, "degraded")
    assert "is stuck at an undo" in admin_client.get(OVERVIEW).content.decode()
    out = StringIO()
    call_command("message_status", "--fail-on", "paused", stdout=out)
    assert "flow orders: 3 open, 2 undoing, 1 stuck" in out.getvalue()

    letter.resolution = "redelivered"
    letter.resolved_at = ago(minutes=1)
    letter.save(using="other")
    assert not any(one.stuck for one in status.read().runs)
    runs.update(since=ago(hours=2))
    assert [one.stuck for one in status.read().runs] == [2]
    # A foreign request's undo is sent after the deadline of the request.
    delayed = factories.OutboxMessageFactory.build(
        message_id=undo, due_at=ago(hours=-1)
    )
    delayed.save(using="other")
    assert [one.stuck for one in status.read().runs] == [1]
    delayed.due_at, delayed.dispatched_at = ago(minutes=50), ago(minutes=50)
    delayed.save(using="other")
    assert [one.stuck for one in status.read().runs] == [1]
    delayed.due_at = delayed.dispatched_at = ago(minutes=61)
    delayed.save(using="other")
    assert [one.stuck for one in status.read().runs] == [2]
    monkeypatch.setattr(message_status, "CAP", 1)
    capped = {"open": 1, "undoing": 1, "undo_stuck": 1}
    assert told()[0]["flows"] == {"orders of shop": capped}


def test_all_is_not_well_beside_an_alarm() -> None:
    worker = factories.WorkerFactory(
        outages=[
            {"kind": "broker", "name": "default", "seconds": 5, "error": "refused"}
        ]
    )
    out = StringIO()

    call_command("message_status", stdout=out)

    assert "Broker default cannot be used" in out.getvalue()
    assert "All is well" not in out.getvalue()
    worker.delete()
    out = StringIO()
    call_command("message_status", stdout=out)
    assert "All is well." in out.getvalue()


def test_list_of_the_outbox_counts_no_state_without_an_index(viewer: Client) -> None:
    with CaptureQueriesContext(connection) as queries:
        page = viewer.get(f"{OVERVIEW}outboxmessage/").content.decode()
    assert "in flight</a>" in page
    assert "overdue</a>" in page
    assert "pending (0)</a>" in page
    counts = [sql for one in queries if "COUNT(" in (sql := one["sql"])]
    assert counts
    assert not [one for one in counts if "lease_until" in one.partition("WHERE")[2]]
