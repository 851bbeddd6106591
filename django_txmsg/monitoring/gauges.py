"""The gauges that the metrics compute from the database, with their descriptions."""

from __future__ import annotations

import datetime as dt
from typing import Any

from .status import Place
from .waiting import Waiting

#: Descriptions by the name of a gauge.
TEXTS = {
    "outbox_waiting": "Messages pending in the outbox, counted up to a cap.",
    "outbox_overdue": "Pending messages due for more than two minutes.",
    "outbox_oldest_due_age_seconds": "How long the oldest has been due.",
    "outbox_dead": "Open dead letters that never left, without muted errors.",
    "outbox_muted": "Open dead letters that never left, of muted errors.",
    "redelivery_waiting": "Messages waiting for another attempt.",
    "redelivery_overdue": "Such messages due for more than two minutes.",
    "redelivery_oldest_due_age_seconds": "How long the oldest has been due.",
    "stage_dead": "Open dead letters of the stage, without muted errors.",
    "stage_muted": "Open dead letters of the stage, of muted errors.",
    "stage_paused": "1 while an operator has paused the stage.",
    "stage_blocked": "Messages that wait for their predecessors, capped.",
    "stage_blocked_bytes": "Their bytes, of as many as were counted.",
    "stage_blocked_oldest_age_seconds": "How long the first has been waiting.",
    "stage_held_keys": "Keys whose messages wait for longer than ORDER_PATIENCE.",
    "stage_full": "1 while an ordered stage receives nothing: too many wait.",
    "stage_workers": "Live processes that run the stage, if it is declared here.",
    "workers": "Living processes.",
    "outage_seconds": "How long a process has been unable to use the named resource.",
    "database_unreadable": "1 while a database in use does not answer.",
    "queue_waiting": "Messages in a queue of the embedded broker.",
    "queue_overdue": "Such messages available for more than two minutes.",
    "queue_oldest_due_age_seconds": "How long the oldest has been available.",
    "deadline_waiting": "Runs of flows that wait for a deadline.",
    "deadline_overdue": "Deadlines passed for more than two minutes.",
    "deadline_oldest_due_age_seconds": "How long ago the oldest has passed.",
    "flow_open": "Runs that have not ended.",
    "flow_undoing": "Runs that are undoing their work.",
    "flow_undo_stuck": "Runs whose undo is dead, or unconfirmed for an hour.",
    "recurring_overdue": "1 while a recurring message was not stored when due.",
    "worker_heartbeat_age_seconds": "Since the last heartbeat of a worker that lives, "
    "or that is silent and was not replaced.",
    "pipeline_alert": "1 while an alert of `pipeline follow` fires.",
    "pipeline_value": "The value that it measured last, in its `unit`.",
    "pipeline_limit": "The value above which it fires.",
    "pipeline_checked_age_seconds": "Since its last measurement.",
}


class Gauges:
    """Gauges by name. All values of a gauge have the same label names. `family` creates
    a gauge."""

    def __init__(self, family: Any) -> None:
        self._family = family
        self.families: dict[str, Any] = {}

    def set(self, name: str, number: float, /, **labels: str) -> None:
        """Set the value of a gauge for these labels."""
        family = self.families.get(name)
        if family is None:
            family = self._family(f"txmsg_{name}", TEXTS[name], labels=list(labels))
            self.families[name] = family
        family.add_metric(list(labels.values()), number)

    def waiting(
        self, kind: str, what: Waiting, now: dt.datetime, /, **labels: str
    ) -> None:
        """Set three gauges for a place: its number of waiting messages, its number of
        overdue messages, and the age of the oldest due message in seconds."""
        age = (now - what.oldest_due).total_seconds() if what.oldest_due else 0.0
        self.set(f"{kind}_waiting", what.count, **labels)
        self.set(f"{kind}_overdue", what.overdue, **labels)
        self.set(f"{kind}_oldest_due_age_seconds", max(age, 0.0), **labels)

    def line(self, place: Place, now: dt.datetime, /, **labels: str) -> None:
        """Set the gauges for an ordered stage: the number of its blocked messages,
        their size in bytes, the age of the oldest in seconds, the number of held keys,
        and whether the stage is full."""
        line = place.line
        age = (now - line.since).total_seconds() if line.since else 0.0
        self.set("stage_blocked", line.count, **labels)
        self.set("stage_blocked_bytes", line.size, **labels)
        self.set("stage_blocked_oldest_age_seconds", max(age, 0.0), **labels)
        self.set("stage_held_keys", line.held, **labels)
        self.set("stage_full", int(place.full_since is not None), **labels)
