"""Measures for alerts: how late a service's messages are, and how many die."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from ..rules import inbox, outbox
from .connection import Connection
from .databases import open_database
from .databases.sqlite import read_instant
from .spec import SourceSpec


def lag(connection: Connection, source: SourceSpec) -> float:
    """Return for how many seconds the oldest message has been due: to leave the outbox,
    or for another attempt. Messages that are held back are not due, like in the app's
    overview."""
    now = connection.clock()
    literal = open_database(source).instant(now, upper=True)
    oldest = [
        read_instant(found)
        for (found,) in connection.rows(
            "SELECT min(due_at) FROM django_txmsg_outboxmessage"
            f" WHERE {outbox.DUE.sql(now=literal)} UNION ALL"
            " SELECT min(due_at) FROM django_txmsg_inboxmessage"
            f" WHERE {inbox.DUE.sql(now=literal)}"
        )
    ]
    return max([(now - one).total_seconds() for one in oldest if one], default=0.0)


def dead_letters(
    connection: Connection, source: SourceSpec, window: dt.timedelta
) -> int:
    """Return how many messages have died within the last `window`."""
    since = open_database(source).instant(connection.clock() - window, upper=False)
    found = connection.value(
        f"SELECT count(*) FROM django_txmsg_deadletter WHERE created_at >= {since}"
    )
    return int(found)


def last_run(
    connection: Connection, source: SourceSpec, job: str
) -> dt.datetime | None:
    """Return when a job was last started here."""
    return read_instant(
        connection.value(
            "SELECT max(started_at) FROM django_txmsg_pipelinerun WHERE job = %s"
            " AND service = %s",
            job, source.service,
        )
    )  # fmt: skip


def lost(
    connection: Connection, source: SourceSpec, verdicts: Sequence[str]
) -> dict[str, int] | None:
    """Return how many messages with each of these verdicts runs of `reconcile` have
    found since the last check, without acknowledged ones. None if there was no check
    yet."""
    # By the run's instant, not by its report: it may end while `follow` is not running.
    weighed = connection.value(
        "SELECT checked_at FROM django_txmsg_pipelinealert WHERE service = %s"
        " AND name = 'lost'",
        source.service,
    )
    if weighed is None:
        return None
    return dict(
        connection.rows(
            "SELECT verdict, count(*) FROM django_txmsg_finding WHERE service = %s"
            f" AND verdict IN ({', '.join(['%s'] * len(verdicts))}) AND found_at > %s"
            " AND acknowledged_at IS NULL GROUP BY verdict ORDER BY verdict",
            source.service, *verdicts, weighed,
        )
    )  # fmt: skip
