"""Step 3 of an HTTP request: sends one control message to the broker, and waits for its
receipt.

Requests that commit at the same time share a broker session: while one request waits
for a receipt, the messages of other requests are collected, and are then sent as one
batch. A broken session is replaced, without an error in the request. After a failure
the broker is not tried again for a while, so that requests do not wait during an
outage. In all cases, a request waits for at most CONTROL_TIMEOUT.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from django.core.signals import setting_changed
from django.db import connections

from .. import conf
from ..brokers import get_broker
from ..brokers.base import Broker, Outgoing, Session
from ..errors import (
    BrokerError,
    BrokerUnavailable,
    DestinationUnavailable,
    DispatchRejected,
    DispatchUnknown,
)
from ..runtime.breaker import Breaker
from ..runtime.per_process import PerProcess
from ..runtime.thread_group import start_daemon


def control_channel() -> Channel:
    """Return this process's connection to the default broker."""
    entry = conf.get().BROKERS["default"]
    return _channels(f"{entry.get('BACKEND')} {entry.get('URL')!s}")


def _open(_: str) -> Channel:
    timeout = conf.get().HTTP.CONTROL_TIMEOUT
    return Channel(get_broker("default").hurried(timeout))


_channels = PerProcess(_open)


@atexit.register
def close_channels() -> None:
    """Close all connections. Call this when the process ends, or after the settings
    have changed."""
    for channel in _channels.clear():
        channel.close()


def _settings_changed(*, setting: str, **_: Any) -> None:
    if setting == "TXMSG":
        close_channels()


setting_changed.connect(_settings_changed, dispatch_uid="django_txmsg.channels")


Outcomes = list[BrokerError | None]

#: Longest pause, in seconds, between probes of a broker that is down.
MAX_PAUSE = 5.0


@dataclass(slots=True, eq=False)
class _Sending:
    """A control message to send, and the thread that waits for its receipt."""

    outgoing: Outgoing
    give_up: float = field(
        default_factory=lambda: time.monotonic() + conf.get().HTTP.CONTROL_TIMEOUT
    )
    #: Set when its outcome is known, or when its thread must send the gathered
    #: messages.
    turn: threading.Event = field(default_factory=threading.Event)
    known: bool = False
    error: BrokerError | None = None

    @property
    def left(self) -> float:
        """Seconds for which the message's thread may still wait."""
        return max(0.0, self.give_up - time.monotonic())

    def end(self, error: BrokerError | None) -> None:
        if not self.known:
            self.error, self.known = error, True
            self.turn.set()


class Channel:
    """One session with a broker, used by one thread at a time."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._session: Session | None = None
        self._breaker = Breaker(broker.alias, MAX_PAUSE)
        self._lock = threading.Lock()
        #: The thread that sends the gathered messages: a request's, or one that
        #: connects. The first of those that gather meanwhile is the next.
        self.leader: object | None = None
        self._gathered: list[_Sending] = []

    def send(self, outgoing: Outgoing) -> None:
        """Send one message, and return when the broker has confirmed it.

        During the pause after a failure, raises BrokerUnavailable without sending the
        message. Raises DispatchUnknown if the broker does not answer within
        CONTROL_TIMEOUT. Raises another BrokerError if the message cannot be sent.
        """
        mine = _Sending(outgoing)
        if self.broker.stored_in is not None:
            # The broker's tables: the message belongs to this thread's own transaction.
            with self.broker.open() as session:
                (mine.error,) = session.send([outgoing])
        else:
            self._send_with_others(mine)
        if mine.error is not None:
            raise mine.error

    def close(self) -> None:
        """Close the session, unless a thread is using it now."""
        with self._lock:
            if self.leader is None and self._session is not None:
                self._session.close()
                self._session = None

    def _send_with_others(self, mine: _Sending) -> None:
        self._check()
        try:
            with self._lock:
                self._gathered.append(mine)
                self.leader = self.leader or mine
                leads = self.leader is mine
            if not leads:
                mine.turn.wait(mine.left)
            if self.leader is mine and mine.left:
                mine.turn.clear()
                self._lead(mine)
                mine.turn.wait(mine.left)
            if not mine.known:
                late = DispatchUnknown(
                    f"broker {self.broker.alias!r} gave no receipt within "
                    f"{conf.get().HTTP.CONTROL_TIMEOUT:g} s"
                )
                self._breaker.failed(late)
                mine.end(late)
        finally:
            # Runs also when a time-out of the web server is raised in this thread, so
            # that the next sender is always woken.
            with self._lock:
                if mine in self._gathered:
                    self._gathered.remove(mine)
            self._hand_on(mine)

    def _hand_on(self, leader: object) -> None:
        with self._lock:
            if self.leader is leader:
                following = self.leader = next(iter(self._gathered), None)
                if following is not None:
                    following.turn.set()

    def _lead(self, mine: _Sending) -> None:
        """Send the collected messages in the existing session. If there is no usable
        session, or if too little time is left, start a thread that sends the messages.
        The thread opens a new session if necessary. So a request never waits longer
        than CONTROL_TIMEOUT, even if the new session opens later."""
        with self._lock:
            group, self._gathered = self._gathered, []
        with self._telling(group):
            self._check()
            if mine.left > conf.get().HTTP.CONTROL_TIMEOUT / 2:
                outcomes = self._send_as_before(group, mine.left)
                if outcomes is not None:
                    self._tell(group, outcomes)
                    return
            name, work = "txmsg-control-connect", self._send_aside
            with self._lock:
                try:
                    self.leader = start_daemon(name, work, group)
                except RuntimeError as error:
                    # No thread can be started, or the process is exiting.
                    raise BrokerUnavailable(f"cannot connect: {error}") from error

    def _send_aside(self, group: list[_Sending]) -> None:
        try:
            with self._telling(group):
                timeout = conf.get().HTTP.CONTROL_TIMEOUT
                outcomes = self._send_as_before(group, timeout)
                if outcomes is None:
                    session = self.broker.open()
                    outcomes = self._send_in(session, group, isolate=len(group) > 1)
                self._tell(group, outcomes)
        finally:
            self._hand_on(threading.current_thread())
            # A broker in a database has used this thread's connections.
            connections.close_all()

    def _check(self) -> None:
        if self._breaker.remaining:
            raise BrokerUnavailable(
                f"broker {self.broker.alias!r} did not answer a moment ago"
            )

    @contextlib.contextmanager
    def _telling(self, group: list[_Sending]) -> Iterator[None]:
        """If the block raises, report an error to each request whose message is in the
        group, because that request waits for an outcome."""
        try:
            yield
        except BrokerError as error:
            self._breaker.failed(error)
            for one in group:
                one.end(error)
        except BaseException:
            for one in group:
                one.end(BrokerUnavailable("the thread that was sending has ended"))
            raise

    def _tell(self, group: list[_Sending], outcomes: Outcomes) -> None:
        for one, outcome in zip(group, outcomes, strict=True):
            one.end(outcome)
        if unproven := next(filter(_unproven, outcomes), None):
            self._breaker.failed(unproven)
        else:
            self._breaker.worked()

    def _send_as_before(self, group: list[_Sending], timeout: float) -> Outcomes | None:
        """Send the group in the existing session. Returns None if the group must be
        sent again in a new session: there is no session, the session is broken, or a
        refused message may have affected the others."""
        session, self._session = self._session, None
        if session is None:
            return None
        # A broker that does not answer would not answer on a new connection either.
        patience = time.monotonic() + timeout / 2
        try:
            outcomes = self._send_in(session, group, timeout=timeout)
        except BrokerError:
            if time.monotonic() > patience:
                raise
            return None
        again = _unsound(outcomes) and time.monotonic() < patience
        return None if again else outcomes

    def _send_in(
        self,
        session: Session,
        group: list[_Sending],
        *,
        isolate: bool = False,
        timeout: float | None = None,
    ) -> Outcomes:
        try:
            outcomes = session.send(
                [one.outgoing for one in group], isolate=isolate, timeout=timeout
            )
        except BaseException:
            _close_aside(session)
            raise
        if _unsound(outcomes):
            _close_aside(session)
        else:
            self._session = session
        return outcomes


def _unproven(outcome: BrokerError | None) -> bool:
    """Return True if, with this outcome, the broker may or may not have stored the
    message."""
    answered = (DispatchRejected, DestinationUnavailable)
    return outcome is not None and not isinstance(outcome, answered)


def _unsound(outcomes: Outcomes) -> bool:
    """Return True if the session may be broken, or if a refused message may have
    affected others. The refusal of a single message is an answer."""
    return any(outcomes) if len(outcomes) > 1 else any(map(_unproven, outcomes))


def _close_aside(session: Session) -> None:
    """Close a session in another thread, because closing may block if the broker does
    not answer."""

    def close() -> None:
        try:
            session.close()
        finally:
            connections.close_all()

    with contextlib.suppress(RuntimeError):  # no thread: the process ends
        start_daemon("txmsg-control-close", close)
