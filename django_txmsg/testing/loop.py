"""The scripted broker's only thread. It runs an event loop of asyncio.

The thread holds the broker's lock while it handles a frame or a timer. Every public
method of the broker takes this lock, so a test never sees a frame that is only partly
handled. Only this thread uses the transports.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import Future


class Loop:
    """An event loop in a separate thread."""

    def __init__(
        self, lock: threading.Condition, on_error: Callable[[Exception], None]
    ) -> None:
        """Start a loop that uses the broker's lock. If a function of the test raises an
        exception, the loop calls ``on_error`` and continues."""
        self._lock = lock
        self._on_error = on_error
        #: The transports that are open.
        self.transports: set[asyncio.Transport] = set()
        # Whatever policy is set: other threads take sockets from this kind of loop.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="scripted-broker", daemon=True
        )
        self._thread.start()

    def serve(
        self,
        sock: socket.socket,
        connected: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> Future[asyncio.Server]:
        """Accept connections from a listening socket. ``connected`` creates the
        protocol of a connection."""
        serving = self._loop.create_server(connected, sock=sock, ssl=tls)
        return asyncio.run_coroutine_threadsafe(serving, self._loop)

    def close(self, server: Future[asyncio.Server]) -> None:
        """Close a listening socket, and return when it is closed. The caller must not
        hold the lock."""
        listening = server.result()

        async def close() -> None:
            listening.close()

        if threading.current_thread() is self._thread:
            listening.close()
        elif not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(close(), self._loop).result()

    def call(self, action: Callable[[], None], delay: float = 0.0) -> None:
        """Run the action on the loop's thread, after a delay in seconds."""
        self._loop.call_soon_threadsafe(
            self._loop.call_later, delay, self.attempt, action
        )

    def attempt(self, action: Callable[[], None]) -> None:
        """Run the action with the lock held. Call this on the loop's thread."""
        with self._lock:
            try:
                action()
            except Exception as error:
                self._on_error(error)

    def stop(self) -> None:
        """Close every connection and end the thread. The caller must not hold the
        lock."""

        def end() -> None:
            for transport in self.transports:
                transport.abort()
            self._loop.call_soon(self._loop.stop)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(end)
            self._thread.join(10)
            self._loop.close()
