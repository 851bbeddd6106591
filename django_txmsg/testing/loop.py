"""The scripted broker's only thread. It waits for sockets and timers.

The thread holds the broker's lock while it handles a frame or a timer. Every public
method of the broker takes this lock, so a test never sees a frame that is only partly
handled.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import socket
import threading
import time
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
    """Waits for channels and timers in a separate thread."""

    def __init__(
        self, lock: threading.Condition, on_error: Callable[[Exception], None]
    ) -> None:
        """Create a loop that uses the broker's lock. Call ``start`` to run the loop. If
        a function of the test raises an exception, the loop calls ``on_error`` and
        continues."""
        self._lock = lock
        self._on_error = on_error
        self._channels: set[Channel] = set()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._alarm, self._alarmed = socket.socketpair()
        for end in (self._alarm, self._alarmed):
            end.setblocking(False)
        self._selector.register(self._alarmed, READ)
        self._running = True
        self._thread = threading.Thread(
            target=self._run, name="scripted-broker", daemon=True
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, channel: Channel) -> None:
        """Watch a channel. The caller holds the lock."""
        self._channels.add(channel)
        self.wake()

    def remove(self, channel: Channel) -> None:
        """Stop watching a channel. The caller holds the lock, and closes the socket
        afterwards."""
        self._channels.discard(channel)
        if channel.sock.fileno() in self._selector.get_map():
            self._selector.unregister(channel.sock)

    def call_later(self, delay: float, action: Callable[[], None]) -> None:
        """Run the action on the loop's thread after a delay in seconds."""
        due = time.monotonic() + delay
        heapq.heappush(self._timers, (due, next(self._numbers), action))
        self.wake()

    def wake(self) -> None:
        """Make the loop call ``wanted()`` of every channel again, without delay."""
        if threading.current_thread() is not self._thread:
            # If the pipe's buffer is full, it has been woken often enough.
            with contextlib.suppress(BlockingIOError):
                self._alarm.send(b"!")

    def stop(self) -> None:
        """End the thread and close every channel. The caller must not hold the lock."""
        if not self._running:
            return
        self._running = False
        self.wake()
        self._thread.join(10)
        for channel in self._channels:
            channel.sock.close()
        self._selector.close()
        self._alarm.close()
        self._alarmed.close()

    def _run(self) -> None:
        while self._running:
            with self._lock:
                timeout = self._run_timers()
                self._register()
            ready = self._selector.select(timeout)
            with self._lock:
                for key, events in ready:
                    if key.data is None:
                        self._alarmed.recv(4096)
                    elif key.data in self._channels:
                        self._attempt(partial(key.data.ready, events))

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._on_error(error)

    def _run_timers(self) -> float | None:
        while self._timers:
            left = self._timers[0][0] - time.monotonic()
            if left > 0:
                return left
            self._attempt(heapq.heappop(self._timers)[2])
        return None

    def _register(self) -> None:
        known = self._selector.get_map()
        for channel in self._channels:
            wanted, number = channel.wanted(), channel.sock.fileno()
            if number not in known:
                if wanted:
                    self._selector.register(channel.sock, wanted, channel)
            elif not wanted:
                self._selector.unregister(channel.sock)
            elif known[number].events != wanted:
                self._selector.modify(channel.sock, wanted, channel)
