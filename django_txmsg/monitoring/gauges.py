"""The gauges that the metrics show of the tables, and what each of them says."""

from __future__ import annotations

from typing import Any

#: By the name of a gauge.
TEXTS = {
    "outbox_waiting": "Messages pending in the outbox, counted up to a cap.",
    "outbox_overdue": "Pending messages due for more than two minutes.",
    "outbox_oldest_due_age_seconds": "How long the oldest has been due.",
    "outbox_dead": "Open dead letters that never left, without muted errors, capped.",
    "outbox_muted": "Open dead letters that never left, of muted errors.",
    "redelivery_waiting": "Messages waiting for another attempt.",
    "redelivery_overdue": "Such messages due for more than two minutes.",
    "redelivery_oldest_due_age_seconds": "How long the oldest has been due.",
    "stage_dead": "Open dead letters of the stage, without muted errors, capped.",
    "stage_muted": "Open dead letters of the stage, of muted errors.",
    "stage_paused": "1 while an operator holds the stage.",
    "stage_in_line": "Messages that wait for the ones before them, capped.",
    "stage_in_line_bytes": "Their bytes, of as many as were counted.",
    "stage_in_line_oldest_age_seconds": "How long the first has been waiting.",
    "stage_held_keys": "Keys whose messages wait for longer than ORDER_PATIENCE.",
    "stage_full": "1 while an ordered stage receives nothing, as too many wait.",
    "stage_workers": "Living processes that run the stage, of those declared here.",
    "workers": "Processes with a heartbeat in the last 30 seconds.",
    "queue_waiting": "Messages in a queue of the embedded broker.",
    "queue_overdue": "Such messages available for more than two minutes.",
    "queue_oldest_due_age_seconds": "How long the oldest has been available.",
    "worker_heartbeat_age_seconds": "Since a worker's last heartbeat.",
    "pipeline_alert": "1 while an alert of `pipeline follow` fires.",
    "pipeline_value": "What it has measured.",
    "pipeline_limit": "Above what it fires.",
    "pipeline_checked_age_seconds": "Since it has measured.",
}


class Gauges:
    """Gauges by name, each with one label, as `family` makes them."""

    def __init__(self, family: Any) -> None:
        self._family = family
        self.families: dict[str, Any] = {}

    def set(self, name: str, label: str, value: str, number: float) -> None:
        """Note the number of what the label has as its value."""
        family = self.families.get(name)
        if family is None:
            family = self._family(f"txmsg_{name}", TEXTS[name], labels=[label])
            self.families[name] = family
        family.add_metric([value], number)

    def waiting(self, kind: str, label: str, value: str, what: Any, now: Any) -> None:
        """Note how many wait, how many are overdue, and the oldest's age."""
        age = (now - what.oldest_due).total_seconds() if what.oldest_due else 0.0
        self.set(f"{kind}_waiting", label, value, what.count)
        self.set(f"{kind}_overdue", label, value, what.overdue)
        self.set(f"{kind}_oldest_due_age_seconds", label, value, max(age, 0.0))

    def line(self, stage: str, place: Any, now: Any) -> None:
        """Of an ordered stage: what waits there for the messages before it."""
        line = place.line
        age = (now - line.since).total_seconds() if line.since else 0.0
        self.set("stage_in_line", "stage", stage, line.count)
        self.set("stage_in_line_bytes", "stage", stage, line.size)
        self.set("stage_in_line_oldest_age_seconds", "stage", stage, max(age, 0.0))
        self.set("stage_held_keys", "stage", stage, line.held)
        self.set("stage_full", "stage", stage, int(place.full_since is not None))
