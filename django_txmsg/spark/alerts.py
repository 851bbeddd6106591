"""Alerts of `pipeline follow`. An alert compares a measured value with its bound.

Each alert is a row in the database. So alerts survive a killed process, and every web
process can show them in its metrics. When an alert begins or ends, the row is written
first, then the webhook is called, then the call is recorded. So the webhook is called
at least once for each beginning and each end. All calls for one alert have the same id.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..rules import inbox, outbox
from ..webhook import Webhook, alert_message
from .connection import Connection, read_instant
from .databases import open_database
from .spec import SourceSpec, hidden

_ALERTS = "django_txmsg_pipelinealert"
_COLUMNS = "name, value, bound, firing, since, summary, told"


@dataclass(frozen=True)
class Alert:
    """A measured value and its bound, and whether the value is above the bound. `told`
    is the last status that the webhook has accepted: "", "firing" or "resolved"."""

    name: str
    value: float
    bound: float
    firing: bool
    since: dt.datetime | None
    summary: str
    told: str = ""

    @property
    def status(self) -> str:
        """The status at the last measurement: "firing" or "resolved"."""
        return "firing" if self.firing else "resolved"

    @property
    def news(self) -> bool:
        """Whether the webhook has not yet accepted the current status."""
        return self.firing != (self.told == "firing")


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
            Alert(name, value, bound, bool(firing), read_instant(since), *more)
            for name, value, bound, firing, since, *more in found
        ]

    def weigh(
        self, name: str, value: float, bound: float, summary: str, *, hold: bool = False
    ) -> None:
        """Record a measured value. The alert fires while the value is above its bound.
        If the webhook has accepted the beginning of an alert, but not its end, and the
        value exceeds the bound again, the alert continues under the same id.

        Pass hold=True for a number of events: the alert then fires until the webhook
        has accepted its beginning. Until then, later events are added to it."""
        firing, now = value > bound, self.connection.clock()
        held = "(old.firing AND old.told <> 'firing')" if hold else "FALSE"
        self.connection.execute(
            f"INSERT INTO {_ALERTS} AS old (service, name, value, bound, firing, since,"
            " summary, told, checked_at) VALUES (%s, %s, %s, %s, %s, %s, %s, '', %s)"
            " ON CONFLICT (service, name) DO UPDATE SET bound = excluded.bound,"
            f" value = excluded.value + CASE WHEN {held} THEN old.value ELSE 0 END,"
            f" summary = substr(CASE WHEN {held} THEN old.summary || ' ' ELSE '' END"
            " || excluded.summary, 1, 1000),"
            " firing = excluded.firing, checked_at = excluded.checked_at, since ="
            " CASE WHEN excluded.firing AND NOT old.firing AND old.told <> 'firing'"
            " THEN excluded.since ELSE old.since END"
            f" WHERE excluded.firing OR NOT {held}",
            self.service, name, min(value, 1e18), bound, firing,
            now if firing else None, hidden(summary)[:1000], now,
        )  # fmt: skip

    def drop(self) -> None:
        """Delete all alerts, because the service has another name now."""
        sql = f"DELETE FROM {_ALERTS} WHERE service = %s"
        self.connection.execute(sql, self.service)

    def record_delivery(self, alert: Alert) -> None:
        """Record that the webhook has accepted the current status of an alert."""
        self.connection.execute(
            f"UPDATE {_ALERTS} SET told = %s WHERE service = %s AND name = %s",
            alert.status, self.service, alert.name,
        )  # fmt: skip


class Telling:
    """Delivers the alerts of one service. `say` prints a line on the terminal. When
    `stop` is set, the delivery no longer waits for the webhook."""

    def __init__(
        self,
        service: str,
        webhook: Webhook | None,
        stop: threading.Event,
        say: Callable[[str], None],
    ) -> None:
        self.service, self.webhook, self.stop, self.say = service, webhook, stop, say
        self.firing: list[Alert] = []
        self._logged: dict[str, bool] = {}
        #: The database's own alert, which it cannot store itself.
        self._away: Alert | None = None

    def tell(self, connection: Connection) -> None:
        """Deliver all beginnings and ends of alerts that the webhook has not accepted
        yet."""
        alerts = Alerts(connection, self.service)
        found = alerts.read()
        self.firing = [one for one in found if one.firing]
        for alert in found:
            if self._logged.get(alert.name, False) != alert.firing:
                self._logged[alert.name] = alert.firing
                self.say(f"{alert.status}: {alert.name}: {alert.summary}")
            if alert.news and self._post(alert):
                alerts.record_delivery(alert)
        self._tell_away()

    def database_is_away(self, seconds: float, bound: float, error: str) -> None:
        """Begin the alert for an outage of the database. If the alert has begun but was
        not delivered, deliver it again."""
        if self._away is None:
            now = dt.datetime.now(dt.timezone.utc)
            self._away = Alert("database", seconds, bound, True, now, error)
        self._tell_away()

    def database_is_back(self) -> None:
        """End the alert for an outage of the database, if it is firing."""
        if self._away is not None:
            self._away = replace(self._away, firing=False)
            self._tell_away()

    def _tell_away(self) -> None:
        if (away := self._away) is None:
            return
        if away.news and self._post(away):
            away = replace(away, told=away.status)
        waits = away.news and self.webhook is not None
        self._away = away if away.firing or waits else None

    def _post(self, alert: Alert) -> bool:
        """Call the webhook, and return whether it has accepted the alert."""
        if self.webhook is None:
            return False
        message = alert_message(
            self.service, alert.name, firing=alert.firing, since=alert.since,
            summary=alert.summary, value=alert.value, limit=alert.bound,
        )  # fmt: skip
        if self.webhook.post(message, self.stop):
            return True
        if self.webhook.error:
            self.say(f"The webhook did not accept {alert.name}: {self.webhook.error}.")
        return False


def lag(connection: Connection, source: SourceSpec) -> float:
    """Return the seconds since the oldest due message became due. Pending messages
    count, and so do messages that wait for another attempt. Messages that are held back
    or that a worker is processing do not count."""
    now = connection.clock()
    literal = open_database(source).instant(now, upper=True)
    oldest = [
        read_instant(found)
        for (found,) in connection.rows(
            "SELECT min(due_at) FROM django_txmsg_outboxmessage"
            f" WHERE {outbox.DUE.sql(now=literal)} UNION ALL"
            f" SELECT min({inbox.DUE_SINCE.sql()}) FROM django_txmsg_inboxmessage"
            f" WHERE {inbox.DUE.sql(now=literal)}"
        )
    ]
    return max([(now - one).total_seconds() for one in oldest if one], default=0.0)


def dead_letters(
    connection: Connection, source: SourceSpec, window: dt.timedelta
) -> int:
    """Return the number of messages that died within the last `window`."""
    since = open_database(source).instant(connection.clock() - window, upper=False)
    sql = f"SELECT count(*) FROM django_txmsg_deadletter WHERE created_at >= {since}"
    return int(connection.value(sql))


def count_lost(
    connection: Connection, source: SourceSpec, verdicts: Sequence[str]
) -> Counter[str]:
    """Count the unacknowledged findings with one of `verdicts` that no earlier call has
    seen, by verdict, and mark all findings as counted. Call it in the transaction that
    stores the count: if that transaction fails, the next call counts them again."""
    rows = connection.rows(
        "UPDATE django_txmsg_finding SET counted = TRUE WHERE service = %s"
        f" AND verdict IN ({', '.join(['%s'] * len(verdicts))})"
        " AND NOT counted RETURNING verdict, acknowledged_at",
        source.service, *verdicts,
    )  # fmt: skip
    return Counter(verdict for verdict, known_since in rows if known_since is None)
