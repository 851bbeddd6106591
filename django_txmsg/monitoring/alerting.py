"""Reports the beginning and the end of alarms to receivers outside the admin.

Each `relay` process has a thread for alerts. Each alert is a row of the database, so
only one process can begin it. The row is written first. A process then delivers the
alert, and then records the delivery. So an alert is delivered at least once. If it is
delivered again, it has the same id.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from django.core import mail
from django.db import router

from .. import conf, signals
from ..conf.schema import BAD
from ..models import Alert
from ..models.fields import local
from ..models.monitoring import LEASE
from ..runtime import liveness
from ..scheduling.time_loop import TimeLoop
from ..webhook import TIMEOUT, NoWebhook, Webhook, alert_message
from . import alarms, status
from .lengths import duration
from .status import Status

log = logging.getLogger("django_txmsg.alerts")

#: Seconds between two comparisons, and for which alerts are delivered between them.
EVERY = 15.0
#: Most alerts about dead letters at a time; more are one alert.
MOST_DEAD = 50


def wanted(picture: Status, kinds: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the kind and the text of each current alarm of these kinds, by the alarm's
    name.

    Dead letters have a separate alarm for each error and place. So a new error is
    reported even if an older error is still open.
    """
    found = {}
    for alarm in alarms.of(picture):
        bad = alarm.tone == "bad" and BAD in kinds
        if alarm.kind != "dead" and (bad or alarm.kind in kinds):
            text = f"{alarm.what}{alarm.more}"  # without the words of others
            found[f"{alarm.kind}/{alarm.about}"] = (alarm.kind, text)
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


def said_unwatched(using: str) -> str:
    """Return a text for operators if the settings disable alerts while alerts of this
    service are open. Otherwise return ""."""
    opened = Alert.objects.using(using).filter(
        service__in=conf.get().services, ended_at=None
    )
    if conf.get().ALERTS.KINDS or not opened.exists():
        return ""
    return (
        'TXMSG["ALERTS"]["KINDS"] is empty, so relays no longer watch the alerts that '
        "are firing, and do not end them."
    )


class Alerting(TimeLoop):
    """Begins, ends and delivers the alerts of this service, until stopped."""

    refused = "alerts cannot be raised"

    def __init__(self, using: Sequence[str]) -> None:
        super().__init__(using)
        self._first_seen: dict[str, float] = {}
        #: For an alert that has not reached all receivers: the receivers that it has
        #: reached. These are not called again.
        self._reached: dict[tuple[int, str], set[str]] = {}

    def is_idle(self, using: str) -> bool:
        """Return True if this process stores no alerts in the database. Either the
        settings disable alerts, or alerts are stored in another database."""
        return using != router.db_for_write(Alert) or not conf.get().ALERTS.KINDS

    @cached_property
    def _webhook(self) -> Webhook | None:
        return Webhook.from_environment(conf.get().ALERTS.WEBHOOK_ENV)

    def _keep(self, using: str) -> float:
        """Compare the current alarms with the open alerts. Deliver the alerts that have
        begun or ended, for EVERY seconds: more would delay the next comparison. Return
        the seconds until the next comparison."""
        if not self.is_idle(using):
            self._compare(using)
            alerts = Alert.objects.db_manager(using).undelivered(conf.get().services)
            left = {(one.pk, one.status) for one in alerts}
            self._reached = {k: v for k, v in self._reached.items() if k in left}
            until = time.monotonic() + EVERY
            for alert in alerts:
                liveness.turned(LEASE)  # a receiver may take its time
                self._deliver(alert, using)
                if self._stop.is_set() or time.monotonic() > until:
                    break
        return EVERY

    def _compare(self, home: str) -> None:
        alerts, service = Alert.objects.db_manager(home), conf.get().SERVICE
        settings, now = conf.get().ALERTS, time.monotonic()
        picture = status.read()
        found = {
            name[:255]: alarm for name, alarm in wanted(picture, settings.KINDS).items()
        }
        # A renamed service ends what it has begun under its former name.
        ours = alerts.filter(service__in=conf.get().services, ended_at=None)
        opened = {one.name: one for one in ours}
        # An alert lasts while any process cannot reach the database.
        outages = picture.attendance.outages
        away = {f"database/{one.name}" for one in outages if one.kind == "database"}
        changed = (found.keys() ^ opened.keys()) - (away & opened.keys())
        # What lasts for a moment only, as in a deployment, is not reported.
        self._first_seen = {name: self._first_seen.get(name, now) for name in changed}
        for name in sorted(changed):
            if now - self._first_seen[name] < settings.AFTER:
                continue
            if name in found:
                kind, text = found[name]
                if alerts.begin(service, name, kind, text):
                    self._announce(name, kind, "firing", text)
                continue
            ended = opened[name]
            # The alarm may concern a database that does not answer, or be one of those
            # that are only counted now.
            unknown = picture.unreadable and ended.kind != "database"
            if f"{ended.kind}/more" in found or unknown:
                continue
            if alerts.end(ended.pk):
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
        reached = self._reached.setdefault((alert.pk, alert.status), set())
        receivers = {"webhook": self._call, "mail": self._mail}
        for name, send in receivers.items():
            if name not in reached and send(alert, message):
                reached.add(name)
        if len(reached) == len(receivers):
            alerts.delivered(alert)

    def _mail(self, alert: Alert, message: Mapping[str, str]) -> bool:
        to = list(conf.get().ALERTS.MAIL)
        if not to:
            return True
        # A header has no line ends.
        subject = " ".join(message["text"].split())[:200]
        try:
            text = f"{alert.text}\n\nSince {local(alert.since)}."
            # Django 6.1 deprecates get_connection().
            new = hasattr(mail, "mailers")
            backend: Any = mail.mailers.default if new else mail.get_connection()
            # A mail server that does not answer would block all alerts.
            if getattr(backend, "timeout", TIMEOUT) is None:
                backend.timeout = TIMEOUT
            backend.send_messages([mail.EmailMessage(subject, text, None, to)])
        except Exception as error:  # of any kind, by the project's mail backend
            log.warning("alert %s was not mailed: %r", alert.name, error)
            return False
        return True

    def _call(self, alert: Alert, message: Mapping[str, str]) -> bool:
        try:
            webhook = self._webhook
        except NoWebhook as error:
            log.error(
                'alert %s was not delivered: TXMSG["ALERTS"]: %s', alert.name, error
            )
            return False
        if webhook is None or webhook.post(message, self._stop):
            return True
        log.warning("alert %s was not delivered: %s", alert.name, webhook.error)
        return False
