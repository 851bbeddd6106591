"""Limits how long a handler may run: `@stage(..., timeout=)`.

After the time-out, the handler's running query is cancelled in the database server, and
each further query raises an error. A coroutine is cancelled. Other code of the handler
is not interrupted, but the attempt fails even if the handler then returns normally. The
attempt is rolled back and counts like any other. If an operator stops a message, its
attempt ends in the same way, and the message becomes a dead letter.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from typing import Any

from django.db import OperationalError, connections

from ..django_internals import in_block, in_testcase, raw
from ..envelope.failure import is_interrupt, text_of
from ..envelope.handler import Handler
from ..envelope.message import Message, should_end
from ..errors import StageStopped, StageTimedOut
from ..models import InboxMessage, StopRequest
from ..models.fields import Later
from ..models.stage import HOLDS
from ..runtime import database_health
from ..runtime.per_process import PerProcess
from ..runtime.thread_group import Watch
from ..stages import Stage, all_stages

# Around hop 8: an operator asks to stop a message while its handler runs.


def stoppable(message_id: uuid.UUID, using: str) -> list[InboxMessage]:
    """Return a message's unfinished inbox rows at the stages of this service that have
    a timeout. Only at these stages can an operator stop a message. Rows are omitted
    whose next attempt begins after a request to stop them would have expired."""
    timed = [
        one.name
        for one in all_stages()
        if one.timeout is not None and one.definition.using == using
    ]
    rows = InboxMessage.objects.using(using).filter(
        message_id=message_id, stage__in=timed, processed_at=None, dead_at=None
    )
    rows = rows.exclude(due_at__gt=Later(HOLDS.total_seconds()))
    return list(rows.defer("body", "headers"))


def ask_to_stop(message_id: uuid.UUID, *, using: str, why: str) -> bool:
    """Request that the consumers stop a message while they are processing it. Returns
    False if the message has ended or is parked for longer than a minute, or if no stage
    with a timeout has received the message."""
    found = stoppable(message_id, using)
    for one in found:
        StopRequest.objects.db_manager(using).ask(one.stage, message_id, why)
    return bool(found)


log = logging.getLogger("django_txmsg.deadline")

#: Seconds between two cancellations of a running query: the first may have come between
#: two queries.
AGAIN = 0.5
#: Seconds that a server has to accept a cancellation.
PATIENCE = 2.0
#: Seconds beyond the time-out after which PostgreSQL itself cancels a query, in case
#: this process no longer exists. It must not affect what the package stores after the
#: handler.
SPARE = 5.0
#: PostgreSQL's query_canceled.
_CANCELLED = "57014"
#: What Django executes when the handler leaves an `atomic()` block.
_ENDING = ("ROLLBACK TO SAVEPOINT", "RELEASE SAVEPOINT")
#: psycopg's TransactionStatus ACTIVE.
_ACTIVE = 1
#: A lower limit of the connection stays.
_LIMIT = """
SELECT set_config('statement_timeout', CASE
  WHEN current_setting('statement_timeout')::interval > '0'
   AND current_setting('statement_timeout')::interval < %s * interval '1 ms'
  THEN current_setting('statement_timeout') ELSE %s END, true)
"""


def timed(stage: Stage, seconds: float) -> Handler:
    """Return the stage's handler with a limit of `seconds` for each execution."""
    handler = stage.handler

    def limited(message: Message) -> Any:
        limit = Deadline(stage.name, seconds, message.id)
        with ExitStack() as stack:
            stack.callback(should_end.reset, should_end.set(lambda: limit.passed))
            stack.callback(current.reset, current.set(limit))
            for alias in connections:
                stack.enter_context(connections[alias].execute_wrapper(limit))
            _watch().add(limit)
            try:
                try:
                    result = handler(message)
                finally:
                    limit.end()
                    _watch().remove(limit)
            except BaseException as error:
                if limit.explains(error):
                    raise limit.error() from error
                raise
        if limit.passed:
            raise limit.error()
        return result

    return limited


def stop(stage: str, message_id: uuid.UUID, why: str) -> bool:
    """Stop a message that a handler of this process is running. Returns False if no
    handler runs the message."""
    watch = _watch()
    with watch.changed:
        found = [one for one in watch.watched if one.subject == (stage, message_id)]
        for limit in found:
            limit.stop(why)
        watch.changed.notify()
    return bool(found)


class Deadline:
    """The deadline of one execution of a handler. Each connection gets the deadline as
    an `execute_wrapper()`."""

    def __init__(self, name: str, seconds: float, message_id: uuid.UUID) -> None:
        self._name, self._seconds = name, seconds
        self.subject = (name, message_id)
        self._stopped: str | None = None
        self._until = self.due = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._ended = False
        #: The connections that the handler has used.
        self._used: dict[str, Any] = {}
        #: Cancels the handler's coroutine. Called once: a second cancellation would
        #: interrupt how the coroutine ends.
        self.interrupt: Callable[[], object] | None = None

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed, or an operator has stopped the message."""
        return self._stopped is not None or time.monotonic() >= self._until

    def stop(self, why: str) -> None:
        """End the execution now, as if its deadline had passed. The error of the
        attempt gives `why` as the reason."""
        self._stopped, self.due = why, time.monotonic()

    def explains(self, error: BaseException) -> bool:
        """Return whether the attempt must fail with the deadline's error instead of
        `error`. After an operator's stop, this is true for every error: the handler may
        have replaced the error of its cancelled query."""
        if self._stopped is not None:
            return not (isinstance(error, StageStopped) or is_interrupt(error))
        return self.passed and _is_cancelled(error)

    def error(self) -> StageTimedOut | StageStopped:
        """Return the error with which the attempt fails."""
        if self._stopped is not None:
            return StageStopped(
                f"The message was stopped while stage {self._name!r} processed it: "
                f"{self._stopped}"
            )
        return StageTimedOut(
            f"The handler of stage {self._name!r} has taken longer than its timeout of "
            f"{self._seconds:g} s."
        )

    def __call__(
        self,
        execute: Callable[..., Any],
        sql: Any,
        params: Any,
        many: bool,
        context: dict[str, Any],
    ) -> Any:
        """Execute a statement of the handler. Raises the deadline's error instead if
        the deadline has passed."""
        if self.passed and not str(sql).startswith(_ENDING):
            raise self.error()
        connection = context["connection"]
        if connection.alias not in self._used:
            self._used[connection.alias] = connection
            if _is_limited(connection):
                limit = math.ceil((self._seconds + SPARE) * 1000)
                with connection.cursor() as cursor:
                    cursor.execute(_LIMIT, [limit, f"{limit}ms"])
        return execute(sql, params, many, context)

    def cancel(self) -> None:
        """Cancel the handler's running queries, and its coroutine. After the deadline,
        the watch calls this repeatedly until `end()` is called."""
        self.due = time.monotonic() + AGAIN
        with self._lock:
            if self._ended:
                return
            interrupt, self.interrupt = self.interrupt, None
            if interrupt is not None:
                interrupt()
            for connection in list(self._used.values()):
                try:
                    _cancel(connection)
                except Exception:
                    log.debug("a query cannot be cancelled", exc_info=True)

    def end(self) -> None:
        """Record that the handler has ended, so that no later query is cancelled."""
        with self._lock:
            self._ended = True


def _is_limited(connection: Any) -> bool:
    """Return whether to limit statements by PostgreSQL's `statement_timeout`. The limit
    is set for the open transaction, and ends with this transaction. So the result is
    False if no transaction is open. The result is also False in a TestCase: the test's
    own transaction would keep the limit after the handler has ended."""
    transaction = in_block(connection) and not in_testcase(connection)
    return transaction and connection.vendor == "postgresql"


def _cancel(connection: Any) -> None:
    driver = raw(connection)
    if driver is None:
        return
    if connection.vendor != "postgresql":
        driver.interrupt()
    elif driver.info.transaction_status == _ACTIVE:
        if hasattr(driver, "cancel_safe"):
            driver.cancel_safe(timeout=PATIENCE)
        else:  # psycopg2, and psycopg before 3.2
            driver.cancel()


def _is_cancelled(error: BaseException) -> bool:
    if not isinstance(error, OperationalError):
        return isinstance(error, CancelledError)
    code = database_health.sqlstate(error)
    return code == _CANCELLED or text_of(error) == "interrupted"


#: The deadline of the running handler, at a stage with a time-out.
current: ContextVar[Deadline | None] = ContextVar("django_txmsg_deadline", default=None)


def _begin() -> Watch[Deadline]:
    def cancel(limits: list[Deadline]) -> None:
        for limit in limits:
            limit.cancel()

    # Without a thread, an attempt that ends after its time-out still fails.
    refused = partial(log.warning, "no query is cancelled at its time-out: %s")
    return Watch("txmsg-deadlines", cancel, refused)


_watch = PerProcess(_begin)
