"""Runs of flows, with their committed steps and their undos.

A run holds its state, what it waits for, and its caller. States: `waiting → ended`, or
`waiting → undoing → ended`. Each wait has a token of its own, the run's `turn`. Only a
message with the current turn can continue the run, which then gets a new turn.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Collection, Mapping
from typing import Any

from django.db import connections, models
from django.db.models import Q
from django.db.models.functions import Now

from .fields import Later, SqlManager, not_null


class WaitsFor(models.TextChoices):
    """What continues a run."""

    START = "start", "its first step"
    ANSWER = "answer", "an answer"
    RESUME = "resume", "resume()"
    TIME = "time", "an instant"
    ITSELF = "itself", "a transaction of its own"
    JOIN = "join", "several answers"
    UNDO = "undo", "an undo"
    NOTHING = "", "nothing"


class Outcome(models.TextChoices):
    """The outcome with which a run has ended."""

    OPEN = "", "open"
    ANSWERED = "answered", "answered"
    FAILED = "failed", "failed, and undone"
    HANDED_OVER = "handed_over", "handed over"


class RunManager(SqlManager):
    """Changes the states of runs."""

    def locked(self, run_id: uuid.UUID) -> Run | None:
        """Return a run, locked until the transaction ends, or None if the run does not
        exist. SQLite needs no lock, because only one transaction writes at a time."""
        return self._locked("run_id = %s", run_id)

    def take(self, run_id: uuid.UUID, turn: uuid.UUID) -> Run | None:
        """Return the run with this turn, locked as by `locked()`. Returns None if the
        run has another turn by now."""
        return self._locked("run_id = %s AND turn = %s", run_id, turn)

    def _locked(self, condition: str, *values: uuid.UUID) -> Run | None:
        # As text: Django would compose it in more time than all else of a step takes.
        lock = " FOR UPDATE" if connections[self.db].vendor == "postgresql" else ""
        found = self.raw(
            f"SELECT * FROM {self._table} WHERE {condition}{lock}",  # noqa: S608 - constants only
            [one.hex for one in values],
        )
        run: Run | None = next(iter(found), None)
        return run

    def store(
        self,
        run: Run,
        turn: uuid.UUID | None,
        columns: Mapping[str, Any],
        *,
        step: tuple[str, uuid.UUID, str] | None,
    ) -> bool:
        """Write these columns of a run. With `step` (the step's name, its message's id,
        and what the run waits for next), also add a row to the run's history. On
        PostgreSQL both happen in one statement. Returns False, and writes nothing, if
        the run no longer has this turn."""
        connection = connections[self.db]
        table, quoted = self._table, connection.ops.quote_name
        places: list[str] = []
        given: list[Any] = []
        for name, value in columns.items():
            if isinstance(value, Now):
                places.append(f"{name} = {self._sql.began}")
            elif isinstance(value, Later):
                places.append(f"{name} = {self._sql.later()}")
                given.append(value.seconds)
            else:
                places.append(f"{name} = %s")
                field: Any = self.model._meta.get_field(name)
                given.append(field.get_db_prep_save(value, connection))
        given += [run.pk, turn and turn.hex]
        update = f"UPDATE {table} SET {', '.join(places)} WHERE id = %s AND turn = %s"  # noqa: S608 - constants only
        history = self.model._meta.get_field("steps").related_model._meta
        copied = "id, version, state, undos"
        insert = (
            f"INSERT INTO {history.db_table} (run_id, version, state, undos, step,"
            f" message_id, {quoted('then')}) SELECT {copied}, %s, %s, %s FROM"
        )
        with connection.cursor() as cursor:
            if step is None:
                cursor.execute(update, given)
                return bool(cursor.rowcount)
            name, message_id, then = step
            row = [name, message_id.hex, then]
            if connection.vendor == "postgresql":
                cursor.execute(
                    f"WITH moved AS ({update} RETURNING {copied}) {insert} moved",
                    given + row,
                )
                return bool(cursor.rowcount)
            cursor.execute(update, given)
            if moved := bool(cursor.rowcount):
                cursor.execute(f"{insert} {table} WHERE id = %s", [*row, run.pk])
            return moved

    def claim_due(
        self, services: Collection[str], flows: Collection[str], limit: int
    ) -> list[Run]:
        """Return runs of these flows whose deadline has passed, and postpone each of
        these deadlines by a minute. The caller then continues the runs. Call this
        inside a transaction."""
        runs: list[Run] = []
        for service, flow, left in self._firsts(services, flows):
            if left <= 0 and len(runs) < limit:
                due = self.select_for_update(skip_locked=True).filter(
                    service=service, flow=flow, due_at__lte=Now()
                )
                runs += due.order_by("due_at", "pk")[: limit - len(runs)]
        self.filter(pk__in=[run.pk for run in runs]).update(due_at=Later(60))
        return runs

    def next_due(
        self, services: Collection[str], flows: Collection[str]
    ) -> float | None:
        """Return the seconds until the earliest deadline of these flows' runs. The
        value is 0 or less if the deadline has passed, and None if there is no
        deadline."""
        firsts = self._firsts(services, flows)
        return firsts[0][2] if firsts else None

    def _firsts(
        self, services: Collection[str], flows: Collection[str]
    ) -> list[tuple[str, str, float]]:
        """Return each service and flow that has a deadline, with the seconds until its
        first one, in the order of these. Runs of other flows are not read: a removed
        flow may leave a million of them."""
        pairs = [{"service": one, "flow": flow} for one in services for flow in flows]
        source = self._sql.given("g", service="text", flow="text")
        left = f"{self._sql.epoch('due_at')} - {self._sql.epoch()}"
        rows = self._rows(
            f"""
            SELECT service, flow, {left} FROM (
                SELECT g.service, g.flow, (
                    SELECT min(r.due_at) FROM {self._table} r
                    WHERE r.service = g.service AND r.flow = g.flow
                        AND r.due_at IS NOT NULL) AS due_at
                FROM {source}) firsts
            WHERE due_at IS NOT NULL ORDER BY due_at
            """,  # noqa: S608 - constants only
            [json.dumps(pairs)],
        )
        return list(map(tuple, rows))


class Run(models.Model):
    """One run of a flow, in the database of the service that runs the flow."""

    #: The id of the message that started it. For an edited copy: the id of the
    #: original.
    run_id = models.UUIDField(unique=True)
    service = models.CharField(max_length=100)
    flow = models.CharField(max_length=200)
    key = models.CharField(max_length=255, default="")
    #: The version of its state.
    version = models.PositiveIntegerField()
    #: JSON.
    state = models.TextField()
    #: The step that runs next.
    step = models.CharField(max_length=200)
    #: The types and versions that the step took when the run began to wait, one a line.
    reads = models.TextField(default="")
    #: The step that runs if the deadline passes or the request is dead.
    otherwise = models.CharField(max_length=200, default="")
    turn = models.UUIDField(null=True)
    waits_for = models.CharField(max_length=16, choices=WaitsFor.choices, default="")
    #: The destination of its request.
    asked = models.CharField(max_length=255, default="")
    request_id = models.UUIDField(null=True)
    since = models.DateTimeField(db_default=Now())
    #: The deadline of its wait.
    due_at = models.DateTimeField(null=True)
    #: When a call of resume() for it was stored.
    resumed_at = models.DateTimeField(null=True)
    #: It is undoing its work.
    failing = models.BooleanField(default=False)
    #: How many undos were registered.
    undos = models.PositiveIntegerField(default=0)
    #: While the run goes back to a step: how many of its undos, the oldest, stay
    #: registered. The answer is then the argument of that step.
    kept_undos = models.PositiveIntegerField(null=True)
    #: JSON.
    answer = models.TextField(default="")
    answer_type = models.CharField(max_length=255, default="")
    outcome = models.CharField(max_length=16, choices=Outcome.choices, default="")
    #: The caller's headers, by which the answer reaches the caller.
    caller = models.JSONField(default=dict)
    #: The first run of the conversation.
    first_run = models.UUIDField()
    hop = models.PositiveIntegerField(default=0)
    baggage = models.JSONField(default=dict)
    correlation_id = models.CharField(max_length=255, default="")
    created_at = models.DateTimeField(db_default=Now())
    ended_at = models.DateTimeField(null=True)

    objects = RunManager()

    class Meta:
        verbose_name = "run of a flow"
        verbose_name_plural = "runs of flows"
        constraints = [
            models.UniqueConstraint(
                fields=["service", "flow", "key"],
                condition=Q(ended_at__isnull=True) & ~Q(key=""),
                name="txmsg_run_open_key",
            ),
            models.CheckConstraint(
                condition=Q(ended_at__isnull=True, turn__isnull=False)
                | Q(ended_at__isnull=False, turn__isnull=True, due_at__isnull=True),
                name="txmsg_run_ends_once",
            ),
        ]
        indexes = [
            # Only those that wait for an instant, in the order in which it comes.
            models.Index(
                fields=["service", "flow", "due_at"],
                condition=Q(due_at__isnull=False),
                name="txmsg_run_due",
            ),
            models.Index(fields=["flow", "key"], name="txmsg_run_key"),
            not_null("ended_at", "txmsg_run_ended"),
            models.Index(
                fields=["service", "flow"],
                condition=Q(ended_at__isnull=True),
                name="txmsg_run_open",
            ),
            models.Index(
                fields=["service", "flow"],
                condition=Q(ended_at__isnull=True, failing=True),
                name="txmsg_run_undoing",
            ),
        ]
        permissions = [
            ("resume_run", "Can resume runs of flows"),
            ("time_out_run", "Can let the deadlines of runs pass now"),
            ("cancel_run", "Can cancel runs of flows"),
            ("answer_run", "Can answer requests of runs as failed"),
            ("go_back_run", "Can let runs go back to a step"),
        ]

    def __str__(self) -> str:
        return f"{self.flow} {self.key or self.run_id}"

    def wait(self, waits_for: WaitsFor, step: str, **more: Any) -> None:
        """Set the columns of a waiting run in this object, without saving it.
        `waits_for` says what will continue the run, and `step` is the step that runs
        then. Unless `turn` is given, the run gets a new turn."""
        self.waits_for, self.step = waits_for, step
        self.turn = more.get("turn") or uuid.uuid4()
        self.otherwise = more.get("otherwise", "")
        self.asked, self.request_id = more.get("asked", ""), more.get("request_id")
        within: dt.timedelta | None = more.get("within")
        # An expression, as the database reckons it.
        self.due_at = None if within is None else Later(within.total_seconds())
        self.resumed_at = None

    def end(self, outcome: Outcome) -> None:
        """Set the columns of an ended run in this object, without saving it."""
        self.wait(WaitsFor.NOTHING, self.step)
        self.turn, self.outcome, self.ended_at = None, outcome, Now()


# The history of a run: a row for each committed step.


class FlowStep(models.Model):
    """One step of a run, and the state after it."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="steps")
    step = models.CharField(max_length=200)
    #: The message that continued the run.
    message_id = models.UUIDField()
    created_at = models.DateTimeField(db_default=Now())
    version = models.PositiveIntegerField()
    #: JSON, after the step.
    state = models.TextField()
    #: What the run waits for next.
    then = models.CharField(max_length=300, default="")
    #: How many undos were registered by then.
    undos = models.PositiveIntegerField(default=0, db_default=0)
    #: The run has gone back to before this step.
    left = models.BooleanField(default=False, db_default=False)

    class Meta:
        verbose_name = "step of a run"
        verbose_name_plural = "steps of runs"

    def __str__(self) -> str:
        return self.step


# The undos of a run, in case it fails.
#
# A row is written in the transaction that sends the request: after a time-out it is
# unknown whether the request was executed.


class FlowUndo(models.Model):
    """One undo of a run. The undo with the highest number runs first."""

    run = models.ForeignKey(Run, models.CASCADE, related_name="undo_rows")
    number = models.PositiveIntegerField()
    destination = models.CharField(max_length=255)
    body = models.BinaryField()
    body_type = models.CharField(max_length=255, default="")
    #: The request that it undoes; empty: a step's own work.
    request_id = models.UUIDField(null=True)
    created_at = models.DateTimeField(db_default=Now())
    #: It cancels the run of a flow that was asked.
    cancels = models.BooleanField(default=False)
    answered = models.BooleanField(default=False)
    confirmed_at = models.DateTimeField(null=True)

    class Meta:
        verbose_name = "undo of a run"
        verbose_name_plural = "undos of runs"
        constraints = [
            models.UniqueConstraint(fields=["run", "number"], name="txmsg_undo_number")
        ]
        indexes = [not_null("request_id", "txmsg_undo_request")]

    def __str__(self) -> str:
        return f"undo {self.number} by {self.destination}"
