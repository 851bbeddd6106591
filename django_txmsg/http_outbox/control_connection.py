"""Step 3 of an HTTP request: hands one control message to the broker, with a receipt.

Requests that commit at the same time share a conversation: while one waits for its
receipt, those of others gather, and leave together in the next. A session that has gone
stale is replaced without the request noticing; a broker that is down is left alone for
a while, so that an outage costs a request no waiting. Whatever a broker does, a request
waits for CONTROL_TIMEOUT at most, from its first step to its last.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from .. import conf
from ..brokers.base import Broker, Outgoing, Session
from ..errors import (
    BrokerError,
    BrokerUnavailable,
    DestinationUnavailable,
    DispatchRejected,
    DispatchUnknown,
)
from ..runtime.breaker import Breaker

Outcomes = list[BrokerError | None]

#: Longest pause, in seconds, between probes of a broker that is down.
MAX_PAUSE = 5.0


@dataclass(slots=True, eq=False)
class _Sending:
    """A control message on its way, and the thread that waits for its receipt."""

    outgoing: Outgoing
    give_up: float = field(
        default_factory=lambda: time.monotonic() + conf.get().HTTP.CONTROL_TIMEOUT
    )
    #: Set when its outcome is known, or when its thread is to send what has gathered.
    turn: threading.Event = field(default_factory=threading.Event)
    known: bool = False
    error: BrokerError | None = None

    @property
    def left(self) -> float:
        """Seconds that its thread may still wait."""
        return max(0.0, self.give_up - time.monotonic())

    def end(self, error: BrokerError | None) -> None:
        if not self.known:
            self.error, self.known = error, True
            self.turn.set()


class Channel:
    """One session with a broker, in the hands of one thread at a time."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._session: Session | None = None
        self._breaker = Breaker(broker.alias, MAX_PAUSE)
        self._lock = threading.Lock()
        #: Who sends what has gathered: a request's thread, or a connecting one. The
        #: first of what gathers meanwhile is the next.
        self.leader: object | None = None
        self._gathered: list[_Sending] = []

    def send(self, outgoing: Outgoing) -> None:
        """Hand over one message and return once the broker has given its receipt.

        Raises BrokerError: BrokerUnavailable at once while the broker is left alone,
        and DispatchUnknown when there is no answer within CONTROL_TIMEOUT.
        """
        mine = _Sending(outgoing)
        if self.broker.stored_in is not None:
            # Its tables belong to this thread's own transaction.
            with self.broker.open() as session:
                (mine.error,) = session.send([outgoing])
        else:
            self._send_with_others(mine)
        if mine.error is not None:
            raise mine.error

    def close(self) -> None:
        """End the conversation, if nobody is in it."""
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
            # Also when a time-out of the server's was raised in this thread: it leaves
            # no gap behind.
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
        """Send what has gathered, in the session of earlier requests if that works; if
        not, or if too little time is left, let a thread do it, for which nobody need
        wait longer than he has time."""
        with self._lock:
            group, self._gathered = self._gathered, []
        with self._telling(group):
            self._check()
            if mine.left > conf.get().HTTP.CONTROL_TIMEOUT / 2:
                outcomes = self._send_as_before(group, mine.left)
                if outcomes is not None:
                    self._tell(group, outcomes)
                    return
            aside = threading.Thread(
                target=self._send_aside,
                args=(group,),
                name="txmsg-control-connect",
                daemon=True,
            )
            with self._lock:
                try:
                    aside.start()
                except RuntimeError as error:
                    # No thread to be had, or the process ends.
                    raise BrokerUnavailable(f"cannot connect: {error}") from error
                self.leader = aside

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

    def _check(self) -> None:
        if self._breaker.remaining:
            raise BrokerUnavailable(
                f"broker {self.broker.alias!r} did not answer a moment ago"
            )

    @contextlib.contextmanager
    def _telling(self, group: list[_Sending]) -> Iterator[None]:
        """Tell each of the group what became of it, if the block could not."""
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
        """Try the session of earlier requests. None when there is none, when it is of
        no use any more, or when one that the broker refuses may have taken others
        along."""
        session, self._session = self._session, None
        if session is None:
            return None
        # A broker that lets us wait does so on a new connection too.
        patience = time.monotonic() + timeout / 2
        try:
            outcomes = self._send_in(session, group, timeout=timeout)
        except BrokerError:
            if time.monotonic() > patience:
                raise
            return None
        again = any(outcomes) if len(group) > 1 else any(map(_unproven, outcomes))
        return None if again and time.monotonic() < patience else outcomes

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
        if any(outcomes):
            _close_aside(session)
        else:
            self._session = session
        return outcomes


def _unproven(outcome: BrokerError | None) -> bool:
    """Return whether nobody knows if a message is stored."""
    answered = (DispatchRejected, DestinationUnavailable)
    return outcome is not None and not isinstance(outcome, answered)


def _close_aside(session: Session) -> None:
    """Close without making the request wait for a broker that does not answer."""
    name = "txmsg-control-close"
    with contextlib.suppress(RuntimeError):  # no thread to be had: as the process ends
        threading.Thread(target=session.close, name=name, daemon=True).start()
