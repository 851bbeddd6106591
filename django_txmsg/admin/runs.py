"""Runs of flows: the list, a page for each run with a diagram of its steps, and the
actions of operators."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.db import router
from django.db.models import Max, Min, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse

from .. import wire
from ..consuming import bulk_thread
from ..dead_letters import masking
from ..dead_letters.selection import Changed, Shown
from ..errors import TxmsgError
from ..flows import acts
from ..flows.declaration import declarations
from ..flows.going import BACK
from ..models import (
    DeadLetter,
    FlowStep,
    FlowUndo,
    InboxMessage,
    OutboxMessage,
    Run,
)
from ..models.bulk_operation import BulkKind
from ..models.dead_letter import Resolution
from ..monitoring import runs
from . import display
from .audit import perform
from .base import RowPageAdmin, given, insist, led, may, plain, sees_messages
from .body import pretty
from .bulk import PERMISSIONS, start
from .counting import listed
from .filters import BetweenFilter, CountingFilter, StateFilter, filter_of

_PAGE = "admin:django_txmsg_run_change"
#: Undos on the page of a run. A gather can register tens of thousands.
MOST_UNDOS = 50


class RunStateFilter(StateFilter):
    """Filters by the state of the run."""

    uncounted = frozenset({"overdue", "answered", "failed", "handed over"})

    conditions = staticmethod(runs.states)


class FlowFilter(CountingFilter):
    """Filters by flow. The choices are the flows declared here, and flows with open
    runs."""

    title = parameter_name = "flow"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        """Yield the flows with their numbers of open runs."""
        found = dict.fromkeys((one.name for one in declarations()), 0)
        for one in runs.read(model_admin.get_queryset(request).db):
            found[one.flow] = one.open
        for name, number in sorted(found.items()):
            yield name, f"{name} ({listed(number)} open)"


class StepFilter(CountingFilter):
    """Filters by the next step of the run. The choices are steps of flows declared
    here."""

    title = parameter_name = "step"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        """Return the steps of the chosen flow. If no flow is chosen, return the steps
        of all flows."""
        flow = request.GET.get("flow")
        chosen = [one for one in declarations() if flow in (None, one.name)]
        return [
            (name, name) for name in sorted({s for one in chosen for s in one.steps})
        ]


@admin.register(Run)
class RunAdmin(RowPageAdmin):
    """The list of runs, newest first."""

    list_display = ("shown_state", "flow", "key", "step", "waits", "age", "deadline")
    list_display_links = ("shown_state", "flow")
    list_filter = (
        RunStateFilter,
        FlowFilter,
        StepFilter,
        filter_of(BetweenFilter, "time of the last step", column="since"),
    )
    search_fields = ("run_id",)
    search_help_text = "Exact id of a run, or key"
    change_list_template = "admin/django_txmsg/runs.html"

    def get_queryset(self, request: HttpRequest) -> QuerySet[Run]:
        """Return the runs without the long columns, each with the database's current
        time."""
        rows: QuerySet[Run] = super().get_queryset(request)
        return rows.defer("state", "answer", "caller", "baggage").annotate(now=Now())

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Run | None:
        """Return the run with this primary key or run id. Logs and commands show the
        run id."""
        by_pk: Run | None = super().get_object(request, object_id, from_field)
        return by_pk or super().get_object(request, object_id, "run_id")

    def found(self, rows: QuerySet[Any], text: str) -> QuerySet[Any]:
        """Search for a complete run id, or for the key of a run of a flow declared
        here."""
        text = text.strip()
        try:
            return rows.filter(run_id=uuid.UUID(text))
        except ValueError:
            flows = [one.name for one in declarations()]
            return rows.filter(flow__in=flows, key=text)

    # (The column `state` stores the flow's data.)
    shown_state = display.column("state", lambda run: display.badge(word(run)))

    waits = display.column("waits for", lambda run: waits(run))

    # Since when it has waited, or when it ended.
    age = display.column(
        "since", lambda run: display.ago(run.ended_at or run.since, run.now)
    )

    deadline = display.column("deadline", lambda run: display.age(run.due_at, run.now))

    def get_urls(self) -> list[Any]:
        """Add the URLs of the actions."""
        return [
            self.button("<int:pk>/act/<str:name>/", self.act, "run_act"),
            self.at("go-back/", self.go_back, "run_go_back"),
            *super().get_urls(),
        ]

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the list. If a flow and a step are chosen, offer to send back all runs
        that wait for this step."""
        chosen = {name: request.GET.get(name, "") for name in ("flow", "step")}
        may = request.user.has_perm(PERMISSIONS[BulkKind.GO_BACK])
        back = urlencode(chosen) if may and all(chosen.values()) else ""
        return super().changelist_view(request, {"back": back, **(extra_context or {})})

    def go_back(self, request: HttpRequest) -> HttpResponse:
        """Ask for confirmation (GET), or start the bulk operation that sends runs back
        (POST)."""
        may = request.user.has_perm(PERMISSIONS[BulkKind.GO_BACK])
        insist(may and self.has_view_permission(request))
        form = request.POST if request.method == "POST" else request.GET
        flow, step, to = (plain(form.get(one, "")) for one in ("flow", "step", "to"))
        declared = {one.name: one for one in declarations()}.get(flow)
        using = router.db_for_write(Run)
        filters = bulk_thread.filters_of(flow, step, to)
        steps = declared.steps.values() if declared else ()
        targets = [one.name for one in steps if not one.joins]
        if request.method == "POST" and to in targets:
            try:
                operation = start(
                    request,
                    BulkKind.GO_BACK,
                    filters,
                    using,
                    shown=Shown.parse(given(request, "shown")),
                )
                return led(
                    request, "admin:django_txmsg_bulkoperation_change", operation.pk
                )
            except Changed as error:
                messages.warning(request, f"{error} Look at the new numbers.")
            except (TxmsgError, ValueError) as error:
                messages.error(request, str(error))
        found = bulk_thread.matching(filters, using)
        shown = Shown.of(found)
        if not shown.count or not targets:
            messages.warning(request, "No run that waits for this step can go back.")
            return self.led_to_list(request)
        ages = shown.bound(found).aggregate(oldest=Min("since"), newest=Max("since"))
        title = f"Send {shown.count:,} run{'s' * (shown.count != 1)} back to a step?"
        context = {
            **{"flow": flow, "step": step, "steps": targets, **ages},
            **{"count": shown.count, "shown": str(shown)},
        }
        return self.show(request, "go_back", title, context)

    def row_page(self, request: HttpRequest, row: Run) -> HttpResponse:
        """Show one run: its state, its steps and its possible actions."""
        run = row
        using, user = run._state.db, request.user
        declared = {one.name: one for one in declarations()}.get(run.flow)
        states = user.has_perm("django_txmsg.view_message_body")
        steps = FlowStep.objects.using(using).filter(run=run, left=False)
        undos = FlowUndo.objects.using(using).filter(run=run).order_by("-number")
        shown_undos = list(undos.defer("body")[:MOST_UNDOS])
        letters = DeadLetter.objects.using(using).filter(
            message_id=run.request_id, resolution=Resolution.OPEN
        )
        possible = [
            name
            for name, one in acts.ACTS.items()
            if user.has_perm(f"django_txmsg.{one.permission}")
            if declared is not None and not acts.refused(name, run)
        ]
        context = {
            "run": run,
            "word": word(run),
            "waits": waits(run),
            "ended": run.get_outcome_display(),
            "declared": declared,
            "states": states,
            "sees_messages": sees_messages(request),
            "state": pretty(masking.of_run(run.flow, run.state)) if states else "",
            "answer": pretty(masking.of_run(run.flow, run.answer))
            if states and run.ended_at
            else "",
            "sequence": sequence(
                run, signals=declared.signals if declared else (), states=states
            ),
            "undos": shown_undos,
            "kept_undos": run.kept_undos or 0,
            "more_undos": undos.count() - len(shown_undos),
            "revoked": _revoked(shown_undos, using),
            "letter": letters.only("exception", "reason").first()
            if not run.ended_at and may(request, "view_deadletter")
            else None,
            "back": [
                one
                for one in steps.order_by("-pk")[:50]
                if declared and one.step in declared.steps
                if not declared.steps[one.step].joins
            ],
            "possible": possible,
            "seen": run.since.isoformat(),
        }
        return self.show(request, "run", f"Run of {run.flow}", context)

    def act(self, request: HttpRequest, pk: int, name: str) -> HttpResponse:
        """Perform an action on a run, unless the run has advanced since the page was
        loaded."""
        one = acts.ACTS.get(name)
        user: Any = request.user
        may = one is not None and user.has_perm(f"django_txmsg.{one.permission}")
        insist(may and self.has_view_permission(request))
        run = Run.objects.using(router.db_for_write(Run)).filter(pk=pk).first()
        if run is None:
            return self.led_to_list(request)
        fields = ("why", "value", "type", "to")
        entered = acts.Given(**{field: given(request, field) for field in fields})
        seen = request.POST.get("seen", "")
        change = partial(acts.act, name, run, entered, seen=seen)
        perform(request, str(run._state.db), change, refusal="")
        return led(request, _PAGE, pk)


def _revoked(undos: list[FlowUndo], using: str | None) -> set[uuid.UUID | None]:
    """Return the requests that were revoked here before a stage executed them: their
    undos had nothing to do."""
    requests = [one.request_id for one in undos if one.request_id]
    known = InboxMessage.objects.using(using).filter(message_id__in=requests)
    revoked = known.filter(revoked_at__isnull=False)
    done = known.filter(processed_at__isnull=False)
    return {*revoked.values_list("message_id", flat=True)} - {
        *done.values_list("message_id", flat=True)
    }


def word(run: Run) -> str:
    """Return the run's state in one or two words."""
    if run.ended_at is not None:
        return str(run.outcome).replace("_", " ")
    if not run.failing:
        return "waiting"
    return "undoing" if run.kept_undos is None else "going back"


def waits(run: Run) -> str:
    """Return what the run waits for, as text. Returns "-" for an ended run."""
    if run.ended_at is not None:
        return "-"
    return " of ".join(filter(None, (str(run.get_waits_for_display()), run.asked)))


# A run as a sequence diagram of three lines. The left line is the caller, the middle
# line is the flow, and the right line is all other participants. Each step is a box
# that shows how the state changed. Three lines fit the screen of a phone.

#: Most steps that are drawn, the newest; and most lines of a box.
MOST_STEPS, LINES = 100, 12
#: Heights, in the units of the drawing: from a box to the end of its arrow, of a box's
#: head, of one of its lines, and below the last line.
ARROW, HEAD, ROW, GAP = 26, 22, 14, 8
CALLER, FLOW, OTHERS = "caller", "flow", "others"


@dataclass
class Box:
    """The box of one step, with the changes of the state, and the messages that come to
    it and leave it. A message has the line at the other end of its arrow, and a
    label."""

    step: FlowStep
    y: int
    lines: list[tuple[str, str]]
    came: tuple[str, str]
    leaves: tuple[str, str] | None

    @property
    def height(self) -> int:
        """The height of the box."""
        return HEAD + ROW * len(self.lines) + (GAP if self.lines else 0)

    @property
    def end(self) -> int:
        """Where the box ends, with the arrow below it."""
        return self.y + self.height + (ARROW if self.leaves else 0)


@dataclass
class Sequence:
    """The diagram."""

    boxes: list[Box]
    height: int
    #: How many earlier steps are not drawn.
    more: int


def sequence(run: Run, *, signals: Collection[str], states: bool) -> Sequence:
    """Return the diagram of a run. `signals` are the names of the flow's signals. The
    boxes show the state only if `states` is true."""
    using = run._state.db
    rows = FlowStep.objects.using(using).filter(run=run).order_by("-pk")
    newest = list(rows[: MOST_STEPS + 1])
    steps, before = newest[:MOST_STEPS][::-1], newest[MOST_STEPS:]
    sent = OutboxMessage.objects.using(using).filter(
        message_id__in=[one.message_id for one in steps]
    )
    types = {
        one.message_id: one.headers.get(wire.TYPE, "") for one in sent.defer("body")
    }
    state: Any = masking.of_run(run.flow, before[0].state) if before and states else {}
    waits, end, boxes = before[0].then if before else "", ARROW, list[Box]()
    for step in steps:
        lines: list[tuple[str, str]] = []
        if states:
            after = masking.of_run(run.flow, step.state)
            lines, state = difference(state, after), after
        came = _came(step, waits, types, signals, first=not boxes and not before)
        waits = step.then or waits
        leaves = _leaves(waits) if step.then not in ("", "itself") else None
        boxes.append(Box(step, end + ARROW, lines, came, leaves))
        end = boxes[-1].end
    return Sequence(boxes, end + ARROW, rows.count() - len(steps))


def difference(before: Any, after: Any) -> list[tuple[str, str]]:
    """Return the fields that differ between two states, as the lines of a diff. Each
    line has its kind ("added", "removed" or "place")."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return [] if before == after else [("added", f"+ {_text(after)}")]
    lines = []
    for name in dict.fromkeys([*before, *after]):
        if name in before and name in after and before[name] == after[name]:
            continue
        if name in before:
            lines.append(("removed", f"- {name}: {_text(before[name])}"))
        if name in after:
            lines.append(("added", f"+ {name}: {_text(after[name])}"))
    more = len(lines) - LINES
    return lines if more <= 0 else [*lines[:LINES], ("place", f"and {more} more lines")]


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _came(
    step: FlowStep,
    waits: str,
    types: Mapping[uuid.UUID, str],
    signals: Collection[str],
    *,
    first: bool,
) -> tuple[str, str]:
    """Return two values for the message that started a step: the line of the diagram
    at which the message's arrow begins, and the label of the arrow."""
    kind, _, place = waits.partition(" ")
    of = types.get(step.message_id, "")
    if first:
        return CALLER, "start"
    if step.step == BACK:
        return CALLER, "an operator"
    if step.step in signals:
        return CALLER, "signal"
    if of.startswith("txmsg.TimedOut"):
        return FLOW, "deadline passed"
    if of.startswith("txmsg.Dead"):
        return OTHERS, "given up"
    if of.startswith("txmsg.Cancelled"):
        return CALLER, "cancelled"
    return {
        "answer": (OTHERS, f"answer of {place}"),
        "join": (OTHERS, "all answers"),
        "resume": (CALLER, "resumed"),
        "time": (FLOW, "time is up"),
        "undo": (OTHERS, f"done: {place}"),
    }.get(kind, (FLOW, "goes on"))


def _leaves(then: str) -> tuple[str, str]:
    """Return two values for the message that a step sends: the line of the diagram at
    which the message's arrow ends, and the label of the arrow."""
    kind, _, place = then.partition(" ")
    return {
        "answer": (OTHERS, f"asks {place}"),
        "join": (OTHERS, "asks many"),
        "undo": (OTHERS, f"undo by {place}"),
        "resume": (FLOW, "waits for a person"),
        "time": (FLOW, "sleeps"),
        "answered": (CALLER, "answers"),
        "failed": (CALLER, "fails, undone"),
        "handed_over": (OTHERS, "hands over"),
    }.get(kind, (FLOW, then))
