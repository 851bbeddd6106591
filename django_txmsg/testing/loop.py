"""The scripted broker's only thread. It waits for sockets and timers.

The thread holds the broker's lock while it handles a frame or a timer. Every public
method of the broker takes this lock, so a test never sees a frame that is only partly
handled.
"""

from __future__ import annotations

import asyncio
import selectors
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Channel(Protocol):
    """A socket that the loop watches."""

    sock: socket.socket

    def wanted(self) -> int:
        """Return the events to wait for: READ, WRITE, both or 0."""

    def ready(self, events: int) -> None:
        """Read or write without blocking."""


class Loop:
    """Waits for channels and timers in a separate thread, which runs an event loop of
    asyncio."""

    def __init__(
        self, lock: threading.Condition, on_error: Callable[[Exception], None]
    ) -> None:
        """Create a loop that uses the broker's lock. Call ``start`` to run the loop. If
        a function of the test raises an exception, the loop calls ``on_error`` and
        continues."""
        self._lock = lock
        self._on_error = on_error
        #: Each channel, with the events that the event loop waits for.
        self._channels: dict[Channel, int] = {}
        # Whatever policy is set: other threads take sockets from this kind of loop.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="scripted-broker", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, channel: Channel) -> None:
        """Watch a channel. The caller holds the lock."""
        self._channels[channel] = 0
        self.wake()

    def remove(self, channel: Channel) -> None:
        """Stop watching a channel. The caller holds the lock, and closes the socket
        afterwards."""
        if self._channels.pop(channel, None) is not None:
            self._loop.remove_reader(channel.sock)
            self._loop.remove_writer(channel.sock)

    def call_later(self, delay: float, action: Callable[[], None]) -> None:
        """Run the action on the loop's thread after a delay in seconds."""
        later = partial(self._loop.call_later, delay, self._attempt, action)
        self._loop.call_soon_threadsafe(later)

    def wake(self) -> None:
        """Make the loop call ``wanted()`` of every channel again, without delay."""
        if threading.current_thread() is not self._thread:
            self._loop.call_soon_threadsafe(self._watch)

    def stop(self) -> None:
        """End the thread and close every channel. The caller must not hold the lock."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        for channel in self._channels:
            channel.sock.close()

    def _attempt(self, action: Callable[[], None]) -> None:
        with self._lock:
            try:
                action()
            except Exception as error:
                self._on_error(error)
            self._watch()

    def _watch(self) -> None:
        """Wait for the events that the channels want now. Registrations that have not
        changed stay, so that no channel loses an event that was reported already."""
        loop = self._loop
        with self._lock:
            for channel, known in self._channels.items():
                self._channels[channel] = wanted = channel.wanted()
                for event, add, remove in (
                    (READ, loop.add_reader, loop.remove_reader),
                    (WRITE, loop.add_writer, loop.remove_writer),
                ):
                    if event & wanted & ~known:
                        ready = partial(channel.ready, event)
                        add(channel.sock, self._attempt, ready)
                    elif event & known & ~wanted:
                        remove(channel.sock)
