"""Hop 3 in the web process: dispatches the messages of a transaction after its commit.

The dispatcher only saves time. If the process dies or the broker is down, the messages
stay in the outbox, and `manage.py relay` or the receiver of the control message sends
them.
"""

from __future__ import annotations

import atexit
import heapq
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from django.db import connections

from .. import conf, signals
from ..brokers import get_broker
from ..django_internals import in_block, in_memory, in_testcase
from ..errors import BrokerUnavailable
from ..runtime import database_health, notifications
from ..runtime.breaker import Breaker
from ..runtime.connections import recycle
from ..runtime.notifications import notify
from ..runtime.per_process import PerProcess, at_childs_end
from ..runtime.thread_group import Watch
from .lane import AFTER_COMMIT_LEASE, Lane

log = logging.getLogger("django_txmsg.dispatcher")

#: By which the receiver of the signal `messages_committed` can be disconnected.
UID = "django_txmsg.dispatcher"
#: Most commits that wait for the thread. Beyond it, rows wait for the relay.
MAX_WAITING = 10_000
#: After a batch, the thread rests this many times as long as the batch took, at most so
#: many seconds. Under load commits gather meanwhile, and requests keep most of the
#: processor; the first commit after a pause is dispatched at once.
REST, LONGEST_REST = 4.0, 0.25
#: Seconds until each new try of rows that wait for earlier rows of their keys, which
#: another process is sending. After the last try the relay sends them.
AGAIN = (0.05, 0.1, 0.2, 0.4, 0.8)
#: Seconds without a commit after which the thread returns its connections, as
#: CONN_MAX_AGE permits, and checks their age again.
IDLE = 5.0


class Dispatcher:
    """Dispatches messages from one database to one broker, in a daemon thread."""

    def __init__(self, using: str, broker: str) -> None:
        self.using, self.broker = using, broker
        #: When the thread acts next, and until when it rests.
        self.due = self._rested = 0.0
        self._waiting: deque[list[int]] = deque()
        #: When to try rows again, how often they were tried, and the rows; the earliest
        #: first.
        self._again: list[tuple[float, int, list[int]]] = []
        self._lane = Lane(using, broker, longest_lease=AFTER_COMMIT_LEASE)
        self._breaker = Breaker(broker, conf.get().RELAY.BREAKER_MAX_PAUSE)
        self._retry = database_health.Retry(
            using, "committed messages are left to the relay"
        )
        self._stopping = False
        refused = partial(log.debug, "committed messages are left to the relay: %s")
        name = f"txmsg-dispatch-{using}-{broker}"
        self._thread: Watch[Dispatcher] = Watch(name, self._act, refused)

    def wake(self, ids: list[int]) -> None:
        """Request the dispatch of these rows. Never blocks and never fails."""
        with self._thread.changed:
            behind = len(self._waiting) >= MAX_WAITING
            if not behind:
                self._waiting.append(ids)
                self.due = min(self.due, self._rested)
                self._thread.add(self)
        if behind:
            log.debug("dispatcher is behind; %d rows wait for the relay", len(ids))

    def stop(self, timeout: float) -> None:
        """Dispatch the waiting messages, and end the thread. Waits for at most
        `timeout` seconds."""
        with self._thread.changed:
            self._stopping, self.due = True, 0.0
        self._thread.stop(timeout)

    def _act(self, _: object) -> None:
        began, limit = time.monotonic(), conf.get().RELAY.BATCH_SIZE
        batch: list[int] = []
        with self._thread.changed:
            # Commits made in the meantime leave together.
            while self._waiting and len(batch) < limit:
                batch += self._waiting.popleft()
        if not batch and not self._again:
            self._guarded(self._idle)
        for tries, some in [(0, batch), *self._due_again()]:
            if some:
                self._guarded(partial(self._dispatch, some, tries))
        ended = time.monotonic()
        with self._thread.changed:
            self._rested = ended + min(LONGEST_REST, REST * (ended - began))
            again_at = self._again[0][0] if self._again else ended + IDLE
            next_at = self._rested if self._waiting else again_at
            self.due = 0.0 if self._stopping else max(self._rested, next_at)
            over = self._stopping and not self._waiting
            if over:
                self._thread.remove(self)
        if over:
            self._breaker.forget()
            self._guarded(self._lane.close)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Call `work`. The rows are safe in the outbox, and this thread must go on,
        whatever a broker, a pool or a log of the project's own raises."""
        try:
            work()
        except BaseException:
            for close in (self._lane.close, connections[self.using].close):
                with suppress(Exception):
                    close()
            with suppress(Exception):
                log.exception("dispatch after commit failed; the relay will do it")

    def _idle(self) -> None:
        """Return connections as CONN_MAX_AGE permits."""
        recycle(idle=True)
        # The relay has its messages, and works or has its own outage.
        self._breaker.worked(opened=self._lane.opened)

    def _due_again(self) -> list[tuple[int, list[int]]]:
        """Remove and return the rows to try again now. Each item has the number of
        earlier tries, and the ids of the rows."""
        due = []
        while self._again and self._again[0][0] <= time.monotonic():
            _, tries, ids = heapq.heappop(self._again)
            due.append((tries, ids))
        return due

    def _dispatch(self, ids: list[int], tries: int) -> None:
        if self._breaker.remaining or not self._retry.ready:
            return
        try:
            # A restart of the server ends the connection, and only its next use reveals
            # that: then try once more. Rows already claimed keep their lease.
            self._retry.run(lambda: self._dispatch_all(ids, tries))
        except BrokerUnavailable as error:
            self._lane.close()
            if isinstance(error.__cause__, RuntimeError):
                # From Python 3.12 on, an exiting process can start no threads.
                log.info("%d rows are left to the relay: %s", len(ids), error)
            else:
                self._breaker.failed(error)
        recycle(idle=False)

    def _dispatch_all(self, ids: list[int], tries: int) -> None:
        lane, left, answered = self._lane, len(ids), False
        while left > 0 and (claimed := lane.dispatch(ids=ids)):
            left -= claimed
            answered |= lane.answered
        self._breaker.worked(opened=math.inf if answered else lane.opened)
        held = lane.held_back(ids) if left > 0 else []
        if held and tries < len(AGAIN):
            # Together with the earlier rows, whose process may have died.
            at = time.monotonic() + AGAIN[tries]
            heapq.heappush(self._again, (at, tries + 1, held))
        elif held and conf.get().NOTIFY:
            notify(self.using, {notifications.outbox(self.broker)})


def dispatch_inline(using: str, broker: str, ids: list[int]) -> None:
    """Dispatch rows in this thread. If the broker is unavailable, only log the error.
    The caller waits no longer than the time-outs of the broker's connection allow."""
    lane = Lane(using, broker, longest_lease=AFTER_COMMIT_LEASE)
    try:
        while lane.dispatch(ids=ids):
            pass
    except BrokerUnavailable as error:
        log.warning(
            "broker %r cannot be used; %d rows wait: %s", broker, len(ids), error
        )
    finally:
        lane.close()


def on_committed(*, using: str, broker: str, ids: list[int], **_: Any) -> None:
    """Dispatch the rows of a commit in the way that the setting DISPATCH_ON_COMMIT
    selects. Receives the signal `messages_committed`."""
    mode, connection = conf.get().DISPATCH_ON_COMMIT, connections[using]
    if mode == "inline":
        # A TestCase that runs its hooks has committed nothing: no other connection sees
        # it.
        inside = get_broker(broker).stored_in is not None
        if inside or not in_testcase(connection):
            dispatch_inline(using, broker, ids)
    elif mode == "thread" and not (in_block(connection) or in_memory(connection)):
        # Inside a block, as when a test runs its hooks, no other connection sees the
        # rows; and on an in-memory database, another connection would make the test's
        # fail with "table is locked".
        _dispatcher(using, broker).wake(ids)
    elif mode == "off" and conf.get().NOTIFY:
        notify(using, {notifications.outbox(broker)})


def _begin(using: str, broker: str) -> Dispatcher:
    at_childs_end(stop_dispatchers, turn=2)
    return Dispatcher(using, broker)


_dispatcher = PerProcess(_begin)


@atexit.register
def stop_dispatchers(timeout: float = 2.0) -> None:
    """Stop the dispatchers of this process. Each dispatcher may send its waiting
    messages for at most `timeout` seconds. The next commit starts a new dispatcher."""
    for dispatcher in _dispatcher.clear():
        dispatcher.stop(timeout)


signals.messages_committed.connect(on_committed, dispatch_uid=UID)
