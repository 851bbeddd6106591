"""Celery tasks that do the work of `manage.py relay` and `manage.py prune_messages`.

`autodiscover_tasks()` finds these tasks, and Celery beat can run them. Executions may
overlap, also with `manage.py relay`: no message is claimed twice. See
docs/how-to/celery.md.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

from django.db import router

from . import conf
from .errors import BrokerUnavailable, DestinationUnavailable
from .flows.deadlines import Deadlines
from .lazy_imports import needs
from .models import Worker
from .monitoring import retention
from .monitoring.databases import with_tables
from .monitoring.presence import Presence
from .relaying.relay import Relay
from .runtime.per_process import PerProcess
from .scheduling.time_loop import ticked
from .scheduling.timekeeper import Timekeeper

with needs("django_txmsg.tasks", "celery", "celery"):
    from celery import shared_task


def _presence(using: str, service: str) -> Presence:
    # One worker row for all runs of a service: it becomes silent when beat stops.
    return Presence("relay", using, name=f"celery: relay_outbox of {service}"[:255])


_PRESENCE = PerProcess(_presence)
# It remembers the expressions that this process knows, while other code runs, too.
_TIMEKEEPER = PerProcess(lambda *using: Timekeeper(using))


@shared_task(name="django_txmsg.relay_outbox")  # type: ignore[untyped-decorator]  # Celery has no types
def relay_outbox(
    *,
    batch_size: int | None = None,
    databases: list[str] | None = None,
    brokers: list[str] | None = None,
) -> dict[str, Any]:
    """Dispatch due messages, and return the counts by outcome. Recurring messages whose
    tick has come are stored first.

    `databases` defaults to those that the settings and the stages name. A broker that
    is down, or a destination that accepts no messages, is logged and listed under
    "unavailable". Its messages wait for the next execution. All other messages are
    sent.
    """
    using = databases or with_tables()
    presence = _PRESENCE(router.db_for_write(Worker), conf.get().SERVICE)
    presence.beat(0)
    relay = Relay(
        using,
        brokers or sorted(conf.get().BROKERS),
        batch_size=batch_size,
    )
    # relay.unavailable names them.
    unavailable = contextlib.suppress(BrokerUnavailable, DestinationUnavailable)
    beating = presence.beating(lambda: relay.in_flight, relay.stop, stays=True)
    with beating, ticked([_TIMEKEEPER(*using), Deadlines(using)]), unavailable:
        relay.run(once=True)
    counts: dict[str, Any] = dict(relay.counts)
    if relay.unavailable:
        counts["unavailable"] = relay.unavailable
    return counts


@shared_task(name="django_txmsg.prune_messages")  # type: ignore[untyped-decorator]  # Celery has no types
def prune_messages(
    *, batch_size: int = retention.BATCH_SIZE, database: str | None = None
) -> dict[str, int]:
    """Delete settled rows past TXMSG["RETENTION"], and return the counts by kind."""
    counts = Counter[str]()
    for kind, using in retention.places(database):
        counts[kind.name] += sum(retention.prune(kind, using, batch_size=batch_size))
    return dict(counts)
