"""`manage.py txmsg flows`: shows and changes runs of flows."""

from __future__ import annotations

import argparse
import json
import threading
from functools import partial
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import models

from ..dead_letters import masking
from ..errors import TxmsgError
from ..flows import acts
from ..models import FlowStep, FlowUndo, Run
from ..models.fields import Later, clock, local
from ..monitoring import runs
from ..monitoring.lengths import duration
from ..rules.dead_letters import wrong_rate
from .terminal import (
    add_actions,
    chosen_database,
    not_blank,
    perform,
    print_list,
    printable,
    read_age,
    read_ids,
    read_option,
    say,
    values,
    whole_number,
)

#: What `show --json` prints of an undo.
_UNDO = ("number", "destination", "request_id", "confirmed_at")


class Command(BaseCommand):
    """Show, resume, time out, cancel, answer and send back runs of flows."""

    help = "Lists and shows runs of flows, and changes open runs."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        names = ("list", "show", *acts.ACTS)
        for name, action in add_actions(parser, dict.fromkeys(names)).items():
            add = action.add_argument
            add("--database", metavar="ALIAS")
            add("runs", nargs="+" if name == "show" else "*", metavar="RUN",
                help="the id of a run")  # fmt: skip
            add("--flow", type=not_blank, help="the name of the flow")
            add("--key", type=not_blank)
            add("--step", type=not_blank, help="the step that runs next")
            add("--state", choices=list(runs.states()), metavar="STATE",
                help=f"{', '.join(runs.states())} (default: open)")  # fmt: skip
            add("--older-than", type=read_age, metavar="AGE",
                help="has waited at least this long: 30m, 12h, 7d")  # fmt: skip
            if name == "list":
                add("--limit", type=whole_number, default=50, metavar="N")
            if name in ("list", "show"):
                add("--json", action="store_true")
                continue
            add("--all", action="store_true", help="all open runs")
            add("--to", type=not_blank, metavar="STEP", required=name == "go-back",
                help="of go-back: the step")  # fmt: skip
            add("--value", type=not_blank, metavar="JSON",
                help="of resume and go-back: the step's argument")  # fmt: skip
            add("--type", default="", help="its type, if the step takes several")
            add("--why", default="", help="for the audit, and the reason of cancel")
            add("--rate", type=float, metavar="N", help="runs a second at most")
            add("--dry-run", action="store_true", help="print how many")

    def handle(self, *args: Any, **options: Any) -> None:
        using = chosen_database(options, Run)
        options["runs"] = read_ids(options["runs"])
        found = _selected(using, options)
        if options["action"] == "list":
            only_open = not (options["state"] or options["runs"])
            none = f"No {'open ' * only_open}run matches."
            none += " --state answered lists ended ones." * only_open
            limit = read_option(options, "limit", whole_number)
            self._list(found[:limit], using, none, options["json"])
        elif options["action"] == "show":
            self._show(found, using, options["json"])
        else:
            self._act(options["action"], found, using, options)

    def _list(self, found: Any, using: str, none: str, as_json: bool) -> None:
        now = clock(using)
        rows, lines = map(_facts, found), (_line(run, now) for run in found)
        print_list(self.stdout, "runs", rows, lines, none, as_json=as_json)

    def _show(self, found: Any, using: str, as_json: bool) -> None:
        now = clock(using)
        for run in found:
            steps = FlowStep.objects.using(using).filter(run=run).order_by("pk")
            undos = FlowUndo.objects.using(using).filter(run=run).order_by("number")
            if as_json:
                facts = _facts(run) | {
                    "state": masking.of_run(run.flow, run.state),
                    "steps": [_of_step(run, one) for one in steps],
                    "undos": [values(one, *_UNDO) for one in undos],
                }
                self.stdout.write(json.dumps(facts, indent=2))
                continue
            self.stdout.write(_line(run, now))
            for step in steps:
                left = "  (left by going back)" if step.left else ""
                self.stdout.write(
                    f"  {step.pk:>8}  {local(step.created_at)}  {step.step}, then "
                    f"{printable(step.then) or 'as before'}: "
                    f"{json.dumps(masking.of_run(run.flow, step.state))}{left}"
                )
            if run.answer and run.ended_at:
                of = f"answer {printable(run.answer_type)}".rstrip()
                answer = json.dumps(masking.of_run(run.flow, run.answer))
                self.stdout.write(f"  {of}: {answer}")
            for undo in undos:
                done = undo.confirmed_at
                state = f"confirmed {local(done)}" if done else "registered"
                self.stdout.write(f"  undo {undo.number} {undo.destination}: {state}")

    def _act(
        self, action: str, found: Any, using: str, options: dict[str, Any]
    ) -> None:
        options["rate"] = read_option(options, "rate", float)
        if wrong := wrong_rate(options["rate"]):
            raise CommandError(wrong)
        narrowed = ("runs", "flow", "key", "step", "state", "older_than", "all")
        if not any(options[name] for name in narrowed):
            raise CommandError(
                f"To {action} all open runs, say --all. Or give their ids, --flow, "
                f"--key, --step, --state, --older-than."
            )
        given = acts.Given(
            **{name: options[name] or "" for name in ("why", "value", "type", "to")}
        )
        chosen = list(found.only("run_id", "since"))
        if not (chosen or options["runs"]):
            raise CommandError("No run matches.")
        missing = set(options["runs"]) - {run.run_id for run in chosen}
        left = [f"No run {run_id} matches." for run_id in missing]
        if options["dry_run"]:
            self.stdout.write(f"{len(chosen)} to {action}.")
            chosen = []
        for number, run in enumerate(chosen):
            if options["rate"] and number:
                threading.Event().wait(1 / options["rate"])
            change = partial(acts.act, action, run, given, seen=run.since.isoformat())
            try:
                say(self.stdout, perform(using, change))
            except TxmsgError as error:
                left.append(str(error))
        if left:
            raise CommandError("\n".join(left))


def _selected(using: str, options: dict[str, Any]) -> models.QuerySet[Run]:
    rows = acts.find(using).order_by("since", "pk")
    if options["runs"]:
        rows = rows.filter(run_id__in=options["runs"])
    for name in ("flow", "key", "step"):
        if options[name]:
            rows = rows.filter(**{name: options[name]})
    if (age := read_option(options, "older_than", read_age)) is not None:
        ago = Later(-age.total_seconds())
        rows = rows.filter(since__lte=ago)
    state = options["state"] or ("" if options["runs"] else "open")
    return rows.filter(runs.states()[state]) if state else rows


def _facts(run: Run) -> dict[str, Any]:
    names = (
        "run_id", "flow", "key", "step", "waits_for", "asked", "since", "due_at",
        "failing", "outcome", "ended_at",
    )  # fmt: skip
    done = run.answer and run.ended_at
    answer = masking.of_run(run.flow, run.answer) if done else None
    of = run.answer_type if done else None
    return values(run, *names) | {"answer": answer, "answer_type": of}


def _of_step(run: Run, step: FlowStep) -> dict[str, Any]:
    at, state = step.created_at.isoformat(), masking.of_run(run.flow, step.state)
    facts = values(step, "id", "step", "message_id", "then", "left")
    return facts | {"at": at, "state": state}


def _line(run: Run, now: Any) -> str:
    name = f"{run.run_id}  {run.flow} {printable(run.key)}".rstrip()
    if run.ended_at is not None:
        return (
            f"{name}: {run.get_outcome_display()}, {duration(now - run.ended_at)} ago"
        )
    waits = " of ".join(filter(None, (run.get_waits_for_display(), run.asked)))
    due = f", until {local(run.due_at)}" if run.due_at else ""
    return (
        f"{name}: {'undoing, ' * run.failing}{run.step} waits for {waits} for "
        f"{duration(now - run.since)}{due}"
    )
