"""Step 3 of an HTTP request: sends one control message to the broker, and waits for its
receipt.

Requests that commit at the same time share a broker session. A thread sends their
messages: while it waits for receipts, it collects the messages of other requests, and
then sends them as one batch. A broken session is replaced, without an error in the
request. After a failure the broker is not tried again for a while, so that requests do
not wait during an outage. In all cases, a request waits for at most CONTROL_TIMEOUT.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
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


#: Longest pause, in seconds, between probes of a broker that is down.
MAX_PAUSE = 5.0


@dataclass(slots=True, eq=False)
class _Sending:
    """A control message to send. `known` is set as soon as its outcome is known."""

    outgoing: Outgoing
    known: threading.Event = field(default_factory=threading.Event)
    error: BrokerError | None = None

    def end(self, error: BrokerError | None) -> None:
        if not self.known.is_set():
            self.error = error
            self.known.set()


class Channel:
    """One session with a broker. A thread uses the session while there are messages to
    send."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._session: Session | None = None
        self._breaker = Breaker(broker.alias, MAX_PAUSE)
        self._lock = threading.Lock()
        #: The messages that the thread sends next.
        self._gathered: list[_Sending] = []
        #: Whether the thread runs.
        self.sending = False

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
        """Close the session, unless the thread is using it now."""
        with self._lock:
            if not self.sending and self._session is not None:
                self._session.close()
                self._session = None

    def _send_with_others(self, mine: _Sending) -> None:
        self._check()
        timeout = conf.get().HTTP.CONTROL_TIMEOUT
        try:
            with self._lock:
                self._gathered.append(mine)
                self._start()
            if not mine.known.wait(timeout):
                late = DispatchUnknown(
                    f"broker {self.broker.alias!r} gave no receipt within {timeout:g} s"
                )
                self._breaker.failed(late)
                mine.end(late)
        finally:
            # Runs also when a time-out of the web server is raised in this thread.
            with self._lock:
                if mine in self._gathered:
                    self._gathered.remove(mine)

    def _start(self) -> None:
        if not self.sending:
            try:
                start_daemon("txmsg-control-send", self._send_gathered)
            except RuntimeError as error:
                # No thread can be started, or the process is exiting.
                raise BrokerUnavailable(f"cannot send: {error}") from error
            self.sending = True

    def _send_gathered(self) -> None:
        """Send the messages that wait, and those that arrive meanwhile."""
        try:
            while group := self._next_group():
                self._send_group(group)
        except BaseException:
            with self._lock:
                self.sending = False
            raise
        finally:
            # A broker in a database has used this thread's connections.
            connections.close_all()

    def _next_group(self) -> list[_Sending]:
        with self._lock:
            group, self._gathered = self._gathered, []
            self.sending = bool(group)
        return group

    def _check(self) -> None:
        if self._breaker.remaining:
            raise BrokerUnavailable(
                f"broker {self.broker.alias!r} did not answer a moment ago"
            )

    def _send_group(self, group: list[_Sending]) -> None:
        failure: BrokerError | None
        try:
            self._check()
            outcomes = self._outcomes(group)
            failure = next(filter(_unproven, outcomes), None)
        except BrokerError as error:
            outcomes, failure = [error] * len(group), error
        except BaseException:
            for one in group:
                one.end(BrokerUnavailable("the thread that was sending has ended"))
            raise
        for one, outcome in zip(group, outcomes, strict=True):
            one.end(outcome)
        if failure is None:
            self._breaker.worked()
        else:
            self._breaker.failed(failure)

    def _outcomes(self, group: list[_Sending]) -> list[BrokerError | None]:
        """Send a group in the existing session. Send it in a new session if there is no
        session, if the session is broken, or if a refused message may have affected the
        others."""
        timeout = conf.get().HTTP.CONTROL_TIMEOUT
        # A broker that does not answer would not answer on a new connection either.
        patience = time.monotonic() + timeout / 2
        session, self._session = self._session, None
        if session is not None:
            try:
                outcomes = self._send_in(session, group, timeout=timeout)
                if not _unsound(outcomes) or time.monotonic() > patience:
                    return outcomes
            except BrokerError:
                if time.monotonic() > patience:
                    raise
        return self._send_in(self.broker.open(), group, isolate=len(group) > 1)

    def _send_in(
        self,
        session: Session,
        group: list[_Sending],
        *,
        isolate: bool = False,
        timeout: float | None = None,
    ) -> list[BrokerError | None]:
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


def _unsound(outcomes: list[BrokerError | None]) -> bool:
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
