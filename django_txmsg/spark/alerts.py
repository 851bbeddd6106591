"""Alerts of the pipeline: measures compared with their bounds, stored in the database.

Each alert is a row, so that a killed process resumes, the metrics of any web process
show it, and a webhook is called at each beginning and each end. It is called after the
row is written, and the call is recorded afterwards: at least once, with the same id.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from dataclasses import dataclass
from typing import Any

from .connection import Connection
from .databases.sqlite import instant_text, read_instant
from .spec import hidden

_ALERTS = "django_txmsg_pipelinealert"
_COLUMNS = "name, value, bound, firing, since, summary, told"
UTC = dt.timezone.utc


@dataclass(frozen=True)
class Alert:
    """One measure, and whether it is above its bound. `told` is the state that the
    webhook last accepted: none, "firing" or "resolved"."""

    service: str
    name: str
    value: float
    bound: float
    firing: bool
    since: dt.datetime | None
    summary: str
    told: str = ""

    @property
    def status(self) -> str:
        """The present state."""
        return "firing" if self.firing else "resolved"

    @property
    def news(self) -> bool:
        """Whether the webhook has not accepted the present state yet."""
        return self.firing != (self.told == "firing")

    def message(self) -> dict[str, Any]:
        """Return the message for the webhook."""
        since = self.since.isoformat() if self.since else ""
        place = f"{self.service}/{self.name}"
        return {
            "version": 1,
            "id": hashlib.sha256(f"{place} {since}".encode()).hexdigest()[:32],
            "fingerprint": place,
            "status": self.status,
            "service": self.service,
            "alert": self.name,
            "value": self.value,
            "limit": self.bound,
            "since": since,
            "at": dt.datetime.now(UTC).isoformat(),
            "summary": self.summary,
            "text": f"[{self.status}] {place}: {self.summary}",
        }


class Alerts:
    """The alerts of one service, over a connection to its database."""

    def __init__(self, connection: Connection, service: str) -> None:
        self.connection, self.service = connection, service

    def read(self) -> list[Alert]:
        """Return all alerts."""
        found = self.connection.rows(
            f"SELECT {_COLUMNS} FROM {_ALERTS} WHERE service = %s ORDER BY name",
            self.service,
        )
        return [
            Alert(
                self.service,
                name,
                value,
                bound,
                bool(firing),
                read_instant(since),
                *more,
            )
            for name, value, bound, firing, since, *more in found
        ]

    def weigh(
        self, name: str, value: float, bound: float, summary: str, *, hold: bool = False
    ) -> None:
        """Record a measure. It fires above its bound.

        If it fires again before its end was delivered to the webhook, it is the same
        alert. With `hold` it does not end before its beginning was delivered.
        """
        firing, now = value > bound, self._parameter(dt.datetime.now(UTC))
        self.connection.execute(
            f"INSERT INTO {_ALERTS} AS old (service, name, value, bound, firing, since,"
            " summary, told, checked_at) VALUES (%s, %s, %s, %s, %s, %s, %s, '', %s)"
            " ON CONFLICT (service, name) DO UPDATE SET value = excluded.value,"
            " bound = excluded.bound, firing = excluded.firing, summary ="
            " excluded.summary, checked_at = excluded.checked_at, since ="
            " CASE WHEN excluded.firing AND NOT old.firing AND old.told <> 'firing'"
            " THEN excluded.since ELSE old.since END"
            " WHERE NOT (%s AND old.firing AND NOT excluded.firing"
            " AND old.told <> 'firing')",
            self.service, name, min(value, 1e18), bound, firing,
            now if firing else None, hidden(summary)[:1000], now,
            hold,
        )  # fmt: skip

    def told(self, alert: Alert) -> None:
        """Record that the webhook has accepted an alert's present state."""
        self.connection.execute(
            f"UPDATE {_ALERTS} SET told = %s WHERE service = %s AND name = %s",
            alert.status, self.service, alert.name,
        )  # fmt: skip

    def _parameter(self, instant: dt.datetime) -> Any:
        if self.connection.vendor == "sqlite":
            return instant_text(instant, upper=True)
        return instant
