"""Stores the time-outs of runs: a thread of `relay` does, one a process.

A deadline is an instant of the run's row, so that an ask that is answered costs no
timer. Any number of processes may look; what they store for one turn has one id.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from django.db import transaction

from .. import conf, wire
from ..errors import DuplicateMessage
from ..models import Run
from ..models.fields import clock
from ..runtime import database_health
from ..runtime.connections import recycle
from ..sending.outbox import send_part
from .declaration import declarations
from .values import TimedOut, deadline_id, ticket

#: Seconds between two looks at most: another process may have stored a nearer deadline.
LONGEST_WAIT = 1.0
#: Runs whose time-outs are stored in one transaction.
AT_ONCE = 200


class Deadlines:
    """Stores what is due in the databases `using`, until stopped."""

    def __init__(self, using: Sequence[str]) -> None:
        self._using = using
        self._stop = threading.Event()

    @property
    def idle(self) -> bool:
        """Whether no flow is declared for these databases."""
        return not any(one.using in self._using for one in declarations())

    def stop(self) -> None:
        """Finish what is in hand. From any thread or signal."""
        self._stop.set()

    def run(self) -> None:
        """Store what is due until stopped. What the database refuses is tried again."""
        while not self._stop.is_set():
            wait = LONGEST_WAIT
            for using in self._using:
                keeping = database_health.retry(
                    using, "deadlines of flows cannot be stored"
                )
                left = keeping.run(partial(self._keep, using))
                wait = min(wait, LONGEST_WAIT if left is None else left)
                recycle()
            self._stop.wait(wait)

    def tick(self) -> int:
        """Store what is due now, and return how many. Raises database errors."""
        fired = 0
        for using in self._using:
            while more := self._fire(using):
                fired += more
        return fired

    def _keep(self, using: str) -> float:
        """Store what is due in a database, and return for how long nothing is."""
        if self._fire(using) == AT_ONCE:
            return 0.0
        names = [one.name for one in declarations() if one.using == using]
        due = Run.objects.db_manager(using).next_due(conf.get().SERVICE, names)
        if due is None:
            return LONGEST_WAIT
        return max(0.01, min(LONGEST_WAIT, (due - clock(using)).total_seconds()))

    def _fire(self, using: str) -> int:
        known = {one.name: one for one in declarations() if one.using == using}
        if not known:
            return 0
        runs = Run.objects.db_manager(using)
        with transaction.atomic(using=using):
            due = runs.claim_due(conf.get().SERVICE, list(known), AT_ONCE)
            for run in due:
                declared = known[run.flow]
                assert run.turn is not None  # by a constraint
                # Stored already where nobody has gone on for a minute.
                with suppress(DuplicateMessage):
                    send_part(
                        declared.steps_name,
                        TimedOut(),
                        {
                            wire.TICKET: ticket(run.run_id, run.turn),
                            wire.FLOW: str(run.first_run),
                        },
                        correlation_id=run.correlation_id,
                        message_id=deadline_id(run.turn),
                        using=using,
                        broker=declared.broker,
                    )
        return len(due)
