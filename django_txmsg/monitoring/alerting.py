"""Raises alarms outside of the console, and ends them: once each, in whatever process.

It runs in one thread of each `relay` process. An alert is a row, written before it is
delivered; the delivery is recorded afterwards. So it is delivered at least once, with
the same id.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from django.core.mail import send_mail
from django.db import router

from .. import conf, signals
from ..errors import ConfigurationError
from ..models import Alert
from ..rules.alarm_kinds import BAD
from ..scheduling.time_loop import TimeLoop
from ..wire.webhook import NoWebhook, Webhook, alert_message
from . import alarms, status
from .lengths import duration
from .status import Status

log = logging.getLogger("django_txmsg.alerts")

#: Seconds between two looks.
EVERY = 15.0
#: Most alerts about dead letters at a time; more are one alert.
MOST_DEAD = 50


def wanted(picture: Status, kinds: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the alarms of these kinds: kind and text by name. Each error at a place is
    one alarm, so that a new error is reported beside an old one."""
    found = {}
    for alarm in alarms.of(picture):
        bad = alarm.tone == "bad" and BAD in kinds
        if alarm.kind != "dead" and (bad or alarm.kind in kinds):
            found[f"{alarm.kind}/{alarm.about}"] = (alarm.kind, str(alarm))
    if "dead" in kinds or BAD in kinds:
        found |= _dead(picture)
    return found


def _dead(picture: Status) -> dict[str, tuple[str, str]]:
    counts: dict[str, tuple[int, str]] = {}
    for using, one in picture.errors:
        place = status.labelled(one.place, using)
        name = f"dead/{one.fingerprint} {place}"
        count, _ = counts.get(name, (0, ""))
        since = duration(picture.now - one.first)
        text = f"of {place}, error {one.fingerprint or 'none'} ({one.reason})"
        counts[name] = (count + one.count, f"{text}, the oldest {since} ago")
    found = {
        name: ("dead", f"{count:,} dead letter{'s' * (count != 1)} {text}.")
        for name, (count, text) in list(counts.items())[:MOST_DEAD]
    }
    more = len(counts) - len(found)
    if more:
        found["dead/more"] = ("dead", f"Dead letters of {more:,} more errors.")
    return found


class Alerting(TimeLoop):
    """Raises, ends and delivers the alerts of this service, until stopped."""

    longest_wait: ClassVar[float] = EVERY
    refused = "alerts cannot be raised"

    def __init__(self, using: Sequence[str]) -> None:
        super().__init__(using)
        self._first_seen: dict[str, float] = {}

    @property
    def idle(self) -> bool:
        """Whether no alerts are wanted."""
        return not conf.get().ALERTS.KINDS

    @cached_property
    def _webhook(self) -> Webhook | None:
        try:
            return Webhook.from_environment(conf.get().ALERTS.WEBHOOK_ENV)
        except NoWebhook as error:
            raise ConfigurationError(f'TXMSG["ALERTS"]: {error}') from error

    def _keep(self, using: str) -> float:
        """Compare alarms and alerts once. Returns the seconds until the next look."""
        home = router.db_for_write(Alert)
        if using == home and not self.idle:
            self._compare(home)
            for alert in Alert.objects.db_manager(home).undelivered(conf.get().SERVICE):
                if not self._stop.is_set():
                    self._deliver(alert, home)
        return EVERY

    def _compare(self, home: str) -> None:
        alerts, service = Alert.objects.db_manager(home), conf.get().SERVICE
        settings, now = conf.get().ALERTS, time.monotonic()
        found = {
            name[:255]: alarm
            for name, alarm in wanted(status.read(), settings.KINDS).items()
        }
        opened = {
            one.name: one for one in alerts.filter(service=service, ended_at=None)
        }
        changed = found.keys() ^ opened.keys()
        # What lasts for a moment only, as in a deployment, is not reported.
        self._first_seen = {name: self._first_seen.get(name, now) for name in changed}
        for name in sorted(changed):
            if now - self._first_seen[name] < settings.AFTER:
                continue
            if name in found:
                kind, text = found[name]
                if alerts.begin(service, name, kind, text):
                    self._announce(name, kind, "firing", text)
            elif alerts.end(opened[name].pk):
                ended = opened[name]
                self._announce(name, ended.kind, "resolved", ended.text)

    def _announce(self, name: str, kind: str, state: str, text: str) -> None:
        level = logging.ERROR if state == "firing" else logging.INFO
        log.log(level, "alert %s: %s: %s", state, name, text)
        signals.alert_changed.send_robust(
            sender=None, name=name, kind=kind, status=state, text=text
        )

    def _deliver(self, alert: Alert, home: str) -> None:
        alerts = Alert.objects.db_manager(home)
        if not alerts.claim(alert):
            return
        message = alert_message(
            alert.service,
            alert.name,
            firing=alert.ended_at is None,
            since=alert.since,
            summary=alert.text,
            kind=alert.kind,
        )
        webhook, mail = self._webhook, list(conf.get().ALERTS.MAIL)
        if webhook is not None and not webhook.post(message, self._stop):
            log.warning("alert %s was not delivered: %s", alert.name, webhook.error)
            return
        try:
            if mail:
                # A header has no line ends.
                subject = " ".join(message["text"].split())[:200]
                send_mail(subject, f"{alert.text}\n\nSince {alert.since}.", None, mail)
        except OSError as error:
            log.warning("alert %s was not mailed: %s", alert.name, error)
            return
        alerts.delivered(alert)
