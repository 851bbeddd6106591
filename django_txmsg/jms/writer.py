"""The thread that writes to a broker connection and checks deadlines.

Hop 4 of a message. Any thread may queue frames. The writer thread joins the queued
frames into one write, and sends heartbeats when no frame is queued. The writer thread
also checks deadlines, even while the broker reads nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from .ledger import ON_WIRE, QUEUED, Ledger, Pending
from .options import Options
from .transport import Transport


class Writer:
    """The queue of frames, and the thread that writes them. The connection's lock
    guards every attribute."""

    def __init__(
        self,
        transport: Transport,
        lock: threading.RLock,
        ledger: Ledger,
        options: Options,
        on_tick: Callable[[], None],
        on_fault: Callable[[str], None],
    ) -> None:
        """Prepare a thread that writes queued frames to the transport.

        The thread calls ``on_tick`` when deadlines may have passed, and ``on_fault``
        when a write has failed. The lock may be held when ``on_tick`` is called.
        """
        self._transport = transport
        self._ledger = ledger
        self._coalesce_bytes = options.coalesce_bytes
        self._write_timeout = options.send_timeout
        self._heartbeat: float | None = None
        self._on_tick = on_tick
        self._on_fault = on_fault
        self._wake = threading.Condition(lock)
        self._queue: deque[tuple[bytes, Pending | None]] = deque()
        self._idle = False
        #: The monotonic time until which the idle thread sleeps.
        self._until = 0.0
        self._stopped = False
        #: Bytes queued and not yet taken for writing.
        self.queued_bytes = 0
        self._room = threading.Condition(lock)
        self._thread = threading.Thread(
            target=self._run,
            name=f"jms-writer-{transport.address[0]}:{transport.address[1]}",
            daemon=True,
        )

    def start(self, heartbeat: float | None) -> None:
        """Start the thread. ``heartbeat`` is the seconds between heartbeats, or None
        for no heartbeats."""
        self._heartbeat = heartbeat
        self._thread.start()

    def put(self, data: bytes, entry: Pending | None = None) -> None:
        """Queue one or more complete frames. The caller holds the lock."""
        self._queue.append((data, entry))
        self.queued_bytes += len(data)
        if self._idle:
            self._idle = False
            self._wake.notify()

    def put_now(self, data: bytes, entry: Pending) -> None:
        """Write a frame on the calling thread, to save a thread switch. If other frames
        are queued, or the socket would block, queue the frame instead. The caller holds
        the lock."""
        written = 0
        if self._idle and not self._queue:
            # The frame may be written before the next line runs, and so may its answer
            # arrive.
            entry.state = ON_WIRE
            written = self._transport.write_some(data)
            if not written:
                entry.state = QUEUED
        if not written:
            self.put(data, entry)
        elif written < len(data):
            self.put(data[written:])
        elif entry.deadline < self._until:
            self._idle = False
            self._wake.notify()

    def stop(self) -> None:
        """Stop writing. The caller holds the lock."""
        self._stopped = True
        self._queue.clear()
        self._wake.notify()
        self._room.notify_all()

    def wait_for_room(self, limit: int, seconds: float) -> bool:
        """Wait until at most ``limit`` bytes are queued, and return True. Return False
        after ``seconds``. The caller holds the lock."""
        give_up = time.monotonic() + seconds
        while self.queued_bytes > limit and not self._stopped:
            left = give_up - time.monotonic()
            if left <= 0:
                return False
            self._room.wait(left)
        return True

    def join(self, timeout: float) -> None:
        """Wait for the thread to end. Do nothing if the thread never ran, or if it is
        the calling thread."""
        if self._thread is not threading.current_thread() and self._thread.ident:
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while (data := self._next()) is not None:
                self._transport.write(
                    data, timeout=self._write_timeout, tick=self._on_tick
                )
        except OSError:
            pass  # the transport has informed the connection
        except BaseException as error:
            # Without this thread, no deadline would ever be checked.
            self._on_fault(f"a fault of this client: {error!r}")
            raise

    def _next(self) -> bytes | None:
        """Wait for frames, a due heartbeat or a deadline. Return the bytes to write, or
        ``None`` to end the thread."""
        never = float("inf")
        beat = time.monotonic() + self._heartbeat if self._heartbeat else never
        with self._wake:
            while not self._queue and not self._stopped:
                now = time.monotonic()
                if now >= beat:
                    self._on_tick()
                    return b"\n"
                if now >= self._ledger.next_deadline:
                    self._on_tick()
                    continue
                moment = self._until = min(beat, self._ledger.next_deadline)
                self._idle = True
                self._wake.wait(None if moment == never else moment - now)
                self._idle = False
            return None if self._stopped else self._take()

    def _take(self) -> bytes:
        """Join queued frames up to the limit. Never split a frame."""
        parts: list[bytes] = []
        size = 0
        queue = self._queue
        while queue and (not parts or size + len(queue[0][0]) <= self._coalesce_bytes):
            data, entry = queue.popleft()
            self.queued_bytes -= len(data)
            if entry is not None:
                if entry.state is not QUEUED:
                    continue  # cancelled, or its deadline passed while it waited
                entry.state = ON_WIRE
            parts.append(data)
            size += len(data)
        self._room.notify_all()
        return b"".join(parts)
