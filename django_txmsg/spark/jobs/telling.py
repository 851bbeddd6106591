"""Delivers alerts: a line for people, and a call of the webhook, once for each
change."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable
from dataclasses import replace

from ..alerts import Alert, Alerts
from ..connection import Connection
from ..webhook import Webhook


class Telling:
    """Delivers a service's alerts. `say` takes a line for a person; `stop`, once set,
    ends waiting for the webhook."""

    def __init__(
        self,
        service: str,
        webhook: Webhook | None,
        stop: threading.Event,
        say: Callable[[str], None],
    ) -> None:
        self.service, self.webhook, self.stop, self.say = service, webhook, stop, say
        self.firing: list[Alert] = []
        self._said: dict[str, bool] = {}
        #: The database's own alert, which it cannot store itself.
        self._away: Alert | None = None

    def tell(self, connection: Connection) -> None:
        """Deliver the changes that were not delivered yet."""
        alerts = Alerts(connection, self.service)
        found = alerts.read()
        self.firing = [one for one in found if one.firing]
        for alert in found:
            if self._said.get(alert.name, False) != alert.firing:
                self._said[alert.name] = alert.firing
                self.say(f"{alert.status}: {alert.name}: {alert.summary}")
            if self.webhook is None or not alert.news:
                continue
            if self._post(alert):
                alerts.told(alert)
        self._tell_away()

    def database_is_away(self, seconds: float, bound: float, error: str) -> None:
        """Begin the database's alert, or deliver it again if that has failed."""
        if self._away is None:
            self._away = Alert(
                self.service, "database", seconds, bound, True,
                dt.datetime.now(dt.timezone.utc), error,
            )  # fmt: skip
        self._tell_away()

    def database_is_back(self) -> None:
        """End the database's alert, if there is one."""
        if self._away is not None:
            self._away = replace(self._away, firing=False)
            self._tell_away()

    def _tell_away(self) -> None:
        if self.webhook is None or self._away is None or not self._away.news:
            if self._away is not None and not self._away.firing:
                self._away = None
            return
        if self._post(self._away):
            told = replace(self._away, told=self._away.status)
            self._away = told if told.firing else None

    def _post(self, alert: Alert) -> bool:
        assert self.webhook is not None
        if self.webhook.post(alert.message(), self.stop):
            return True
        if self.webhook.error:
            self.say(f"The webhook did not accept {alert.name}: {self.webhook.error}.")
        return False
