"""Stores the time-outs of runs, in a thread of each `relay` process.

A deadline is a column of the run's row, so there is no timer that an answer would have
to cancel. The time-out of a wait always has the same message id, so several processes
may try to store it, and only one succeeds.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

from django.db import Error as AnyDatabaseError
from django.db import OperationalError, transaction

from .. import conf
from ..errors import DuplicateMessage
from ..models import Run
from ..runtime import database_health
from ..scheduling.time_loop import TimeLoop
from .declaration import Declaration, declarations
from .values import TimedOut, deadline_id

log = logging.getLogger("django_txmsg.flows")

#: Longest time, in seconds, between two checks: another process may have stored a
#: nearer deadline.
LONGEST_WAIT = 1.0
#: Pause, in seconds, if another transaction has locked all runs that are due: a step of
#: theirs, or the time-out that another process stores.
LOCKED_WAIT = 0.2
#: Runs whose time-outs are stored in one transaction.
AT_ONCE = 200


class Deadlines(TimeLoop):
    """Stores due time-outs in the databases `using`, until stopped."""

    refused = "deadlines of flows cannot be stored"

    def is_idle(self, using: str) -> bool:
        """Return whether this process declares no flow for the database."""
        return not any(one.using == using for one in declarations())

    def _keep(self, using: str) -> float:
        """Store the time-outs that are due. Return the seconds until the next
        deadline."""
        known = {one.name: one for one in declarations() if one.using == using}
        left = Run.objects.db_manager(using).next_due(conf.get().services, list(known))
        if left is None:
            return LONGEST_WAIT
        if left > 0:
            return min(LONGEST_WAIT, left)
        fired = self._fire(using, known)
        if not fired:
            return LOCKED_WAIT
        return 0.0 if fired == AT_ONCE else 0.01

    def _fire(self, using: str, known: dict[str, Declaration]) -> int:
        """Store the time-outs of runs that are due, and return how many runs these are.
        A time-out that the database refuses for good must not keep the others from
        being stored. Only then does each one get a savepoint, and is dispatched on its
        own."""
        try:
            return self._store(using, known)
        except OperationalError:
            raise
        except AnyDatabaseError as error:
            if database_health.is_away(error):
                raise
        return self._store(using, known, apart=True)

    def _store(
        self, using: str, known: dict[str, Declaration], *, apart: bool = False
    ) -> int:
        runs = Run.objects.db_manager(using)
        refused: list[AnyDatabaseError] = []
        with transaction.atomic(using=using):
            due = runs.claim_due(conf.get().services, list(known), AT_ONCE)
            for run in due:
                declared = known[run.flow]
                assert run.turn is not None  # by a constraint
                message_id = deadline_id(run.turn)
                try:
                    with transaction.atomic(using=using) if apart else nullcontext():
                        declared.continue_run(
                            run, run.turn, TimedOut(), message_id=message_id
                        )
                except DuplicateMessage:
                    pass  # stored already, if the run was not continued in a minute
                except AnyDatabaseError as error:
                    if not apart or database_health.is_away(error):
                        raise
                    refused.append(error)
                    what = f"the time-out of run {run.run_id} is not stored"
                    database_health.report(what, error)
                except Exception:  # another run's time-out is stored all the same
                    log.exception("the time-out of run %s is not stored", run.run_id)
            if refused and len(refused) == len(due):
                raise refused[0]
        return len(due)
