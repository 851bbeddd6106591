"""Every place that uses a rule gets the same result for the same row.

The app uses querysets and SQL, and the pipeline uses SQL on its own connection. The
test computes the expected result in Python, from the row's columns.
"""

from __future__ import annotations

import datetime as dt
import itertools
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib import admin
from django.db import connection
from django.db.models import Q
from django.db.models.functions import Now
from django.test import RequestFactory

from django_txmsg import health
from django_txmsg.admin.inbox import InboxStateFilter
from django_txmsg.admin.outbox import OutboxStateFilter
from django_txmsg.management.commands.message_status import facts
from django_txmsg.management.commands.pipeline import source_spec
from django_txmsg.metrics import Collector
from django_txmsg.models import (
    Attempt,
    DeadLetter,
    FlowUndo,
    InboxMessage,
    OutboxMessage,
    Run,
    StageState,
)
from django_txmsg.models.fields import Holds
from django_txmsg.models.outbox import PENDING
from django_txmsg.monitoring import retention, status
from django_txmsg.monitoring.status import Status
from django_txmsg.rules import outbox as outbox_rules
from django_txmsg.spark.alerts import lag
from django_txmsg.spark.connection import connect_plain
from django_txmsg.spark.ledger import Horizon, Ledger
from django_txmsg.spark.schemas import TABLES
from tests import factories as make
from tests.factories import ago
from tests.running import txmsg
from tests.spark.conftest import committing

pytestmark = committing

Asked = dict[str, Callable[[], bool]]

#: When a row is due, and whether it is then overdue.
DUE = {"long ago": ago(hours=1), "just now": ago(seconds=30), "later": ago(hours=-1)}
LEASES = {"free": None, "held": ago(hours=-1), "ended": ago(minutes=5)}
PAUSED = "orders.paused"


def agree(what: str, expected: bool, asked: Asked) -> None:
    answers = {name: ask() for name, ask in asked.items()}
    assert answers == dict.fromkeys(answers, expected), what


def one(model: Any, condition: Any) -> Callable[[], bool]:
    return lambda: model.objects.filter(condition).exists()


def listed(model: Any, state: str) -> bool:
    """Return whether the admin's list shows `state` as the state of the table's only
    row."""
    site = admin.site._registry[model]
    [row] = site.get_queryset(RequestFactory().get("/"))
    return f">{state}<" in str(site.state(row))


def gauge(name: str) -> float:
    """Return the sum of a metric's values over all places."""
    families = {family.name: family for family in Collector().collect()}
    family = families.get(f"txmsg_{name}")
    return sum(sample.value for sample in family.samples) if family else 0.0


def _lag(picture: Status) -> float:
    """Return the seconds since the oldest due message became due, as shown by the
    overview."""
    places = [picture.outbox, picture.parked, picture.queued]
    places += picture.deadlines.values()
    oldest = min((one.oldest_due for one in places if one.oldest_due), default=None)
    return (picture.now - oldest).total_seconds() if oldest else 0.0


def lags() -> dict[str, float]:
    """Return the seconds since the oldest due message became due, as shown by each
    report."""
    source = source_spec("default", "tests")
    connection_of_its_own = connect_plain(source)
    try:
        pipeline = lag(connection_of_its_own, source)
    finally:
        connection_of_its_own.close()
    picture = status.read()
    told = facts(picture)
    return {
        "pipeline": pipeline,
        "overview": _lag(picture),
        "health": max(health.look("default")["oldest"].values()),
        "message_status": max(
            told[place]["oldest_age"] or 0.0 for place in ("outbox", "redelivering")
        ),
        "metrics": max(
            gauge(f"{place}_oldest_due_age_seconds")
            for place in ("outbox", "redelivery")
        ),
    }


def agree_on_lag(what: str, due: dt.datetime | None) -> None:
    """Check that all reports agree on how long the only row has been due. The row
    became due at `due`. Pass None if the row is not due."""
    found = lags()
    expected = 0.0 if due is None else max(0.0, (ago() - due).total_seconds())
    assert found == pytest.approx(dict.fromkeys(found, expected), abs=5.0), what


def stored() -> Iterator[tuple[str, dict[str, Any]]]:
    ends: dict[str, dict[str, Any]] = {
        "pending": {},
        "dispatched": {"dispatched_at": ago(seconds=1)},
        "dead": {"dead_at": ago(seconds=1), "last_error": "cancelled: it, the broker"},
        "cancelled": {
            "dead_at": ago(seconds=1),
            "cancelled_at": ago(seconds=1),
            "last_error": "paid",
        },
    }
    for end, due, lease in itertools.product(ends, DUE, LEASES):
        yield (
            f"{end}, due {due}, {lease}",
            {
                **ends[end],
                "created_at": ago(hours=2),
                "due_at": DUE[due],
                "lease_until": LEASES[lease],
                "lease_token": uuid.uuid4() if LEASES[lease] else None,
            },
        )


def raw(rule: str) -> bool:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT 1 FROM django_txmsg_outboxmessage o WHERE {rule}", [])
        return cursor.fetchone() is not None


def claimed() -> bool:
    """Claim the only row in the same way as a relay. Return whether the claim
    succeeded."""
    token = uuid.uuid4()
    rows = OutboxMessage.objects.claim(
        broker="default", token=token, lease=60, limit=10
    )
    return bool(rows)


def test_all_agree_on_a_stored_message() -> None:
    states = OutboxStateFilter.conditions()
    for what, columns in stored():
        make.OutboxMessageFactory(**columns)
        pending = columns.keys().isdisjoint({"dispatched_at", "dead_at"})
        due = pending and columns["due_at"] <= ago()
        overdue = due and columns["due_at"] <= ago(minutes=2)
        free = columns["lease_until"] is None or columns["lease_until"] < ago()
        asked: Asked = {
            "the console's filter": one(OutboxMessage, states["pending"]),
            "a queryset": one(OutboxMessage, PENDING),
            "an index's words": lambda: raw(outbox_rules.PENDING.sql("o")),
            "other words": lambda: raw(outbox_rules.PENDING_OTHERWISE.sql("o")),
            "a rule in a queryset": one(
                OutboxMessage, Q(Holds(outbox_rules.PENDING_OTHERWISE))
            ),
            "the overview": lambda: bool(status.read().outbox.count),
            "message_status": lambda: bool(facts(status.read())["outbox"]["count"]),
            "metrics": lambda: bool(gauge("outbox_waiting")),
            "the row": lambda: OutboxMessage.objects.get().state == "pending",
        }
        agree(f"pending: {what}", pending, asked)
        asked = {
            "the console's filter": one(OutboxMessage, states["overdue"]),
            "the console's list": lambda: listed(OutboxMessage, "overdue"),
            "the overview": lambda: bool(status.read().overdue),
            "message_status": lambda: bool(facts(status.read())["overdue"]),
            "metrics": lambda: bool(gauge("outbox_overdue")),
            "health": lambda: health.look("default")["status"] != "ok",
        }
        agree(f"overdue: {what}", overdue, asked)
        asked = {
            "a rule in a queryset": one(
                OutboxMessage, Q(Holds(outbox_rules.DUE, now=Now()))
            ),
            "the overview": lambda: bool(status.read().outbox.due),
        }
        agree(f"due: {what}", due, asked)
        agree_on_lag(f"lag: {what}", columns["due_at"] if due else None)
        for end in ("dispatched", "dead", "cancelled"):
            asked = {
                "the console's filter": one(OutboxMessage, states[end]),
                "the console's list": lambda end=end: listed(OutboxMessage, end),
                "the row": lambda end=end: OutboxMessage.objects.get().state == end,
            }
            agree(f"{end}: {what}", what.startswith(end), asked)
        agree(f"claim: {what}", due and free, {"a relay": claimed})
        OutboxMessage.objects.all().delete()


def received() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "processed", {}
    yield "dead", {"dead": True}
    yield "in hand", {"processed_at": None}
    held: dict[str, dict[str, Any]] = {
        "held back by nothing": {},
        "blocked": {"waits_for": uuid.uuid4(), "key": "k", "waits_since": ago()},
        "in need of newer code": {"needs_type": "orders.Order", "needs_version": 3},
        "of a paused stage": {"stage": PAUSED},
    }
    for why, due in itertools.product(held, DUE):
        yield f"{why}, due {due}", {"parked": True, "due_at": DUE[due], **held[why]}
    for due, lease in itertools.product(DUE, ("held", "ended")):
        yield (
            f"held back by nothing, due {due}, {lease}",
            {
                "parked": True,
                "due_at": DUE[due],
                "lease_until": LEASES[lease],
                "lease_token": uuid.uuid4(),
            },
        )


def test_all_agree_on_a_received_message() -> None:
    StageState.objects.create(stage=PAUSED, paused_at=Now())
    StageState.objects.create(stage="orders.place")
    states = InboxStateFilter.conditions()
    for what, columns in received():
        row = make.InboxMessageFactory(first_received_at=ago(hours=3), **columns)
        parked = row.due_at is not None
        # A row that a worker has claimed is due again when the lease ends.
        since = max(filter(None, (row.due_at, row.lease_until)), default=None)
        due = parked and since <= ago() and "held back by nothing" in what
        overdue = due and since <= ago(minutes=2)
        asked: Asked = {
            "the console's filter": one(InboxMessage, states["redelivering"]),
            "the overview": lambda: bool(status.read().parked.count),
            "message_status": lambda: bool(
                facts(status.read())["redelivering"]["count"]
            ),
            "metrics": lambda: bool(gauge("redelivery_waiting")),
        }
        agree(f"redelivering: {what}", parked and "blocked" not in what, asked)
        asked = {
            "the console's filter": one(InboxMessage, states["overdue"]),
            "the console's list": lambda: listed(InboxMessage, "overdue"),
            "the overview": lambda: bool(status.read().overdue),
            "message_status": lambda: bool(facts(status.read())["overdue"]),
            "metrics": lambda: bool(gauge("redelivery_overdue")),
            "health": lambda: health.look("default")["oldest"]["redelivery"] >= 120,
        }
        agree(f"overdue: {what}", overdue, asked)
        agree_on_lag(f"lag: {what}", since if due else None)
        asked = {
            "the console's filter": one(InboxMessage, states["newer"]),
            "the overview": lambda: any(
                place.newer for place in status.read().stages.values()
            ),
            "health": lambda: "needs_newer_code" in health.look("default"),
        }
        agree(f"newer code: {what}", "newer code" in what, asked)
        InboxMessage.objects.all().delete()


OLD, YOUNG = ago(days=30), ago(days=1)
WEEK = {"OUTBOX": 7, "INBOX": 7, "DEAD_LETTERS": 7}


def archivable(table: str) -> bool:
    """Return whether `pipeline archive` would take a row of a table."""
    ledger = Ledger(source_spec("default", "tests"), TABLES[table])
    try:
        return bool(ledger.waiting(Horizon(ago(days=7))))
    finally:
        ledger.close()


def agree_on_settled(table: str, what: str, expected: bool) -> None:
    """Check that pruning and archiving treat the only row alike: both delete the row,
    or both leave it."""
    model = {"outbox": OutboxMessage, "inbox": InboxMessage, "dead_letters": DeadLetter}
    asked: Asked = {"pipeline archive": lambda: archivable(table)}
    if table in model:
        with txmsg(RETENTION=WEEK):
            [kind] = [k for k in retention.kinds() if k.model is model[table]]
        asked["prune_messages"] = lambda: bool(_prunable(kind))
    agree(f"settled: {table}, {what}", expected, asked)
    for one in (OutboxMessage, InboxMessage, DeadLetter, Attempt):
        one._default_manager.all().delete()


def _prunable(kind: Any) -> int:
    with txmsg(RETENTION=WEEK):
        return retention.count(kind, "default")


def letter(stage: str, **more: Any) -> Callable[[Any], Any]:
    return lambda row: make.DeadLetterFactory(
        message_id=row.message_id, stage=stage, **more
    )


def undo(**more: Any) -> Callable[[Any], Any]:
    """Return a function that stores an undo of a run for its argument, a request."""

    def store(row: Any) -> None:
        ids = {"run_id": row.message_id, "first_run": row.message_id}
        run = Run.objects.create(
            **ids, flow="tests.flow", version=1, state="{}", step="a", turn=uuid.uuid4()
        )
        of = {"request_id": row.message_id, "destination": "tests.undo", "body": b""}
        FlowUndo.objects.create(run=run, number=1, **of, **more)

    return store


DEAD = {"dead_at": OLD, "last_error": "refused"}
EXPIRES_LATER = {"dispatched_at": OLD, "expires_at": YOUNG}
SETTLED_STORED: list[tuple[str, dict[str, Any], Any, bool]] = [
    ("pending", {}, None, False),
    ("dispatched", {"dispatched_at": OLD}, None, True),
    ("dispatched lately", {"dispatched_at": YOUNG}, None, False),
    ("dispatched, dead elsewhere", {"dispatched_at": OLD}, letter(""), True),
    ("dead", DEAD, None, True),
    ("cancelled", {**DEAD, "cancelled_at": OLD}, None, True),
    ("dead lately", {**DEAD, "dead_at": YOUNG}, None, False),
    ("dead, open", DEAD, letter(""), False),
    ("dead, discarded", DEAD, letter("", discarded=True), True),
    ("dead, open at a stage", DEAD, letter("orders.place"), True),
    ("expires later, no undo", EXPIRES_LATER, None, True),
    ("expires later, may be undone", EXPIRES_LATER, undo(), False),
    ("expires later, answered", EXPIRES_LATER, undo(answered=True), True),
    ("expires later, undone", EXPIRES_LATER, undo(confirmed_at=OLD), True),
    ("expired, may be undone", {"dispatched_at": OLD, "expires_at": OLD}, undo(), True),
]


def test_all_agree_on_when_a_stored_message_is_settled() -> None:
    for what, columns, beside, expected in SETTLED_STORED:
        row = make.OutboxMessageFactory(created_at=OLD, **columns)
        if beside is not None:
            beside(row)
        agree_on_settled("outbox", what, expected)


GONE = {"processed_at": None}
BURIED = {**GONE, "dead_at": OLD, "last_error": "no"}
SETTLED_RECEIVED: list[tuple[str, dict[str, Any], Any, bool]] = [
    ("processed", {"processed_at": OLD}, None, True),
    ("processed lately", {"processed_at": YOUNG}, None, False),
    ("processed, may be undone", {"processed_at": OLD}, undo(), False),
    ("processed, answered", {"processed_at": OLD}, undo(answered=True), True),
    ("processed, undone", {"processed_at": OLD}, undo(confirmed_at=OLD), True),
    ("dead, may be undone", BURIED, undo(), True),
    ("copies come", {"processed_at": OLD, "last_received_at": YOUNG}, None, False),
    ("parked", {"parked": True, "due_at": OLD}, None, False),
    ("in hand", GONE, None, False),
    ("in hand, foreign", {**GONE, "created_at": None, "service": ""}, None, False),
    ("killed", {**GONE, "created_at": None, "service": "tests"}, None, True),
    (
        "killed lately",
        {**GONE, "created_at": None, "service": "tests", "last_received_at": YOUNG},
        None,
        False,
    ),
    (
        "a parked task",
        {"parked": True, "due_at": OLD, "created_at": None, "service": "tests"},
        None,
        False,
    ),
    ("dead", BURIED, None, True),
    ("dead lately", {**BURIED, "dead_at": YOUNG}, None, False),
    ("dead, open", BURIED, letter("orders.place"), False),
    ("dead, redelivered", BURIED, letter("orders.place", redelivered=True), True),
    ("dead, open elsewhere", BURIED, letter("mails.send"), True),
]


@pytest.mark.parametrize("failed_at", [OLD, YOUNG])
def test_all_agree_on_when_a_received_message_and_its_attempts_are_settled(
    failed_at: dt.datetime,
) -> None:
    for what, columns, beside, expected in SETTLED_RECEIVED:
        for table in ("inbox", "attempts"):
            row = make.InboxMessageFactory(
                **{"created_at": OLD, "first_received_at": OLD, **columns}
            )
            if beside is not None:
                beside(row)
            make.AttemptFactory(message_id=row.message_id, failed_at=failed_at)
            old = table == "inbox" or failed_at == OLD
            agree_on_settled(table, what, expected and old)


def test_all_agree_on_when_other_records_of_a_message_are_settled() -> None:
    make.AttemptFactory(failed_at=OLD)
    agree_on_settled("attempts", "forgotten by its stage", True)
    one = make.AttemptFactory(failed_at=OLD)
    letter("orders.place")(one)
    agree_on_settled("attempts", "forgotten, its dead letter open", False)
    for what, columns, expected in (
        ("open", {}, False),
        ("discarded", {"discarded": True, "resolved_at": OLD}, True),
        ("redelivered lately", {"redelivered": True, "resolved_at": YOUNG}, False),
    ):
        make.DeadLetterFactory(created_at=OLD, **columns)
        agree_on_settled("dead_letters", what, expected)
