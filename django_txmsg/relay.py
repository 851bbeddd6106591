"""Hop 3 as a process: lanes side by side, until they are stopped.

`manage.py relay` runs it. A broker that is down, or a database, is probed with growing
pauses, and found again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from django.db import InterfaceError, OperationalError, connections

from . import conf
from .breaker import Breaker
from .errors import BrokerUnavailable
from .lane import Lane

#: What a lost or restarting database raises; another try is what it takes.
_DATABASE_ERRORS = (OperationalError, InterfaceError)


class Relay:
    """Lanes over every (database, broker) pair, until stopped.

    `using` and `brokers` are aliases; `batch_size` overrides the setting.
    """

    def __init__(
        self,
        using: list[str],
        brokers: list[str],
        *,
        batch_size: int | None = None,
        lanes: int | None = None,
    ) -> None:
        self._stop = threading.Event()
        count = lanes or conf.get().RELAY.LANES
        max_pause = conf.get().RELAY.BREAKER_MAX_PAUSE
        self._breakers = {name: Breaker(name, max_pause) for name in brokers}
        self.lanes = [
            Lane(alias, broker, batch_size=batch_size)
            for broker in brokers
            for alias in using
            for _ in range(count)
        ]

    @property
    def counts(self) -> Counter[str]:
        """What was done so far: dispatched, rejected, dead, unknown, lease_lost."""
        total: Counter[str] = Counter()
        for lane in self.lanes:
            total += lane.counts
        return total

    @property
    def in_flight(self) -> int:
        """Messages claimed and not yet settled."""
        return sum(lane.in_flight for lane in self.lanes)

    def stop(self) -> None:
        """Finish what is claimed and take nothing new. From any thread or signal."""
        self._stop.set()

    def run(
        self, *, once: bool = False, on_progress: Callable[[], None] | None = None
    ) -> None:
        """Relay until stopped; `once`: until nothing is due or a broker is down.

        Raises the error that ended a lane, if one did, after all have ended.
        """
        errors: list[BaseException] = []

        def work(lane: Lane) -> None:
            try:
                self._work(lane, once, on_progress)
            except Exception as error:
                errors.append(error)
                self._stop.set()
            finally:
                lane.close()
                connections.close_all()

        threads = [
            threading.Thread(target=work, args=(lane,), name=f"txmsg-lane-{number}")
            for number, lane in enumerate(self.lanes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            # A timed join lets the main thread see its signals.
            while thread.is_alive():
                thread.join(0.2)
        if errors:
            raise errors[0]

    def _work(
        self, lane: Lane, once: bool, on_progress: Callable[[], None] | None
    ) -> None:
        breaker = self._breakers[lane.broker_alias]
        interval = conf.get().RELAY.POLL_INTERVAL
        database_down = Breaker(f"database {lane.using}", 10.0)
        while not self._stop.is_set():
            if breaker.remaining:
                self._stop.wait(min(breaker.remaining, 1.0))
                continue
            try:
                claimed = lane.dispatch()
            except BrokerUnavailable as error:
                lane.close()
                breaker.failed(error)
                if once:
                    raise
                continue
            except _DATABASE_ERRORS as error:
                connections[lane.using].close()
                database_down.failed(error)
                if once:
                    raise
                self._stop.wait(database_down.remaining)
                continue
            breaker.worked()
            database_down.worked()
            if claimed:
                if on_progress is not None:
                    on_progress()
                continue
            if once:
                return
            self._stop.wait(interval)
