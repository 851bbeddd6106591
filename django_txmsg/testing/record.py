"""What the scripted broker was sent, and how a test waits for it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from .frames import Frame


@dataclass(frozen=True, slots=True)
class ReceivedFrame(Frame):
    """A frame as a client sent it: on which connection, and when (monotonic)."""

    connection: int = 0
    at: float = field(default_factory=time.monotonic)


class Record:
    """Every frame received, and every wait with a deadline."""

    def __init__(self) -> None:
        """Start empty."""
        #: Held while a frame is handled; every wait is on it.
        self.changed = threading.Condition(threading.RLock())
        #: Every frame received, in order, over all connections.
        self.frames: list[ReceivedFrame] = []
        #: What clients did that STOMP forbids; an honest client leaves it empty.
        self.violations: list[str] = []
        #: What the broker's thread has raised: the test's own functions, in rules.
        self.errors: list[Exception] = []

    def failed(self, error: Exception) -> None:
        """Keep an error for whoever waits; with the lock held."""
        self.errors.append(error)
        self.changed.notify_all()

    def check(self) -> None:
        """Raise the first error of the broker's thread, once."""
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
        """The frames of that command so far; "*" is every command."""
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
        """Wait for that many such frames, and return all there are then.

        Raises ``AssertionError`` that says what did arrive.
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
        """Wait for a condition on the broker; it is asked again after every event.

        Raises ``AssertionError`` that says what did happen, or what a function of the
        test's own has raised on the broker's thread.
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
                # Heart-beats and timers notify nobody, so look again now and then.
                self.changed.wait(min(left, 0.05))

    def describe(self) -> str:
        """Say what has happened so far, for the text of a failure."""
        counts = Counter(frame.command for frame in self.frames)
        frames = ", ".join(f"{n} {command}" for command, n in counts.items())
        return (
            f"Received: {frames or 'nothing'}; violations: {self.violations or 'none'}."
        )

    def record(self, connection: int, frame: Frame) -> None:
        """Note a frame that arrived; with the lock held."""
        self.frames.append(
            ReceivedFrame(frame.command, frame.headers, frame.body, connection)
        )
        self.changed.notify_all()
