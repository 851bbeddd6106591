"""The state that all connections of the scripted broker share: script, store, loop and
settings."""

from __future__ import annotations

import itertools
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .frames import Frame
from .loop import Loop
from .profiles import Profile
from .script import Script
from .store import Store, StoredMessage

# The frames that the scripted broker received, and how a test waits for them.


@dataclass(frozen=True, slots=True)
class ReceivedFrame(Frame):
    """A received frame, with the number of its connection and the monotonic time of its
    arrival."""

    connection: int = 0
    at: float = field(default_factory=time.monotonic)


class Record:
    """Records every received frame, and lets a test wait for frames with a deadline."""

    def __init__(self) -> None:
        """Start empty."""
        #: Held while a frame is handled; every wait is on it.
        self.changed = threading.Condition(threading.RLock())
        #: Every frame received, in order, over all connections.
        self.frames: list[ReceivedFrame] = []
        #: Violations of STOMP by clients; empty for a correct client.
        self.violations: list[str] = []
        #: Exceptions in the broker's thread: those of the test's own functions, in
        #: rules.
        self.errors: list[Exception] = []

    def failed(self, error: Exception) -> None:
        """Store an exception that a test's function raised in the broker's thread, and
        wake the waiting test. The caller holds the lock."""
        self.errors.append(error)
        self.changed.notify_all()

    def check(self) -> None:
        """Raise the first exception of a test's function in the broker's thread. Later
        calls do not raise it again."""
        with self.changed:
            if self.errors:
                raise self.errors.pop(0)

    def received(
        self,
        command: str = "SEND",
        *,
        destination: str | None = None,
        where: Callable[[ReceivedFrame], bool] | None = None,
    ) -> list[ReceivedFrame]:
        """Return the frames with this command that have arrived so far. The command "*"
        matches every frame."""
        with self.changed:
            return [
                frame for frame in self.frames
                if command in (frame.command, "*")
                and (destination is None or frame.destination == destination)
                and (where is None or where(frame))
            ]  # fmt: skip

    def wait_for(
        self,
        command: str = "SEND",
        count: int = 1,
        *,
        timeout: float = 30.0,
        destination: str | None = None,
        where: Callable[[ReceivedFrame], bool] | None = None,
    ) -> list[ReceivedFrame]:
        """Wait until `count` matching frames have arrived, and return all matching
        frames.

        Raises ``AssertionError`` after the timeout, with the number of matching frames
        so far.
        """

        def found() -> list[ReceivedFrame]:
            return self.received(command, destination=destination, where=where)

        self.wait_until(
            lambda: len(found()) >= count, timeout, f"{count} {command} frames"
        )
        return found()

    def wait_until(
        self, condition: Callable[[], bool], timeout: float = 30.0, what: str = ""
    ) -> None:
        """Wait until a condition on the broker is true. The condition is checked after
        every event.

        After the timeout, raises ``AssertionError`` with a description of the events.
        If a function of the test has failed in the broker's thread, raises that
        function's exception.
        """
        deadline = time.monotonic() + timeout
        with self.changed:
            while True:
                self.check()
                if condition():
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError(
                        f"After {timeout:g} s still no {what or condition}. "
                        f"{self.describe()}"
                    )
                # Heartbeats and timers notify no waiter, so check again periodically.
                self.changed.wait(min(left, 0.05))

    def describe(self) -> str:
        """Return a description of all events so far, for the text of an
        ``AssertionError``."""
        counts = Counter(frame.command for frame in self.frames)
        frames = ", ".join(f"{n} {command}" for command, n in counts.items())
        return (
            f"Received: {frames or 'nothing'}; violations: {self.violations or 'none'}."
        )

    def record(self, connection: int, frame: Frame) -> None:
        """Record a received frame. The caller holds the lock."""
        self.frames.append(
            ReceivedFrame(frame.command, frame.headers, frame.body, connection)
        )
        self.changed.notify_all()


@dataclass(frozen=True, slots=True)
class Split:
    """How the broker splits each write into pieces. The broker pauses after each
    piece."""

    every: int | None = None
    at: tuple[int, ...] = ()
    pause: float = 0.0

    def pieces(self, data: bytes) -> list[bytes]:
        """Return the pieces into which the bytes of one write are split."""
        if self.every:
            return [data[i : i + self.every] for i in range(0, len(data), self.every)]
        borders = [0, *(b for b in sorted(self.at) if 0 < b < len(data)), len(data)]
        return [data[a:b] for a, b in itertools.pairwise(borders)]


class BrokerState(Record):
    """The state of the scripted broker, without sockets. Use it only with the lock
    held."""

    def __init__(
        self,
        profile: Profile,
        *,
        versions: Sequence[str],
        users: Mapping[str, str] | None,
        heart_beat: tuple[int, int] | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        """See ``ScriptedBroker``."""
        super().__init__()
        self.profile, self.versions, self.users = profile, versions, users
        self.heart_beat, self.tls = heart_beat, tls
        self.loop = Loop(self.changed, self.failed)
        self.script = Script()
        self.store = Store()
        self.split = Split()
        self.silent = False

    def is_topic(self, headers: Mapping[str, str]) -> bool:
        """Return True if the imitated broker would treat the destination in these
        headers as a topic."""
        if not self.profile.routes_by_header:
            return headers.get("destination", "").startswith("/topic/")
        routing = headers.get("destination-type", headers.get("subscription-type"))
        return routing != "ANYCAST"

    def store_message(self, message: StoredMessage) -> None:
        """Store a message in its queue, or in the queues of its topic's
        subscriptions."""
        if self.is_topic({**message.headers, "destination": message.destination}):
            self.store.publish(message)
        else:
            self.store.queue(message.destination).put(message)
