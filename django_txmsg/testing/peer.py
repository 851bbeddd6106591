"""The scripted broker's socket to one client.

The broker's loop calls this module, which reads and writes over TCP or TLS without
blocking. The script decides how writes are split, and whether heartbeats are sent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections import deque
from functools import partial
from typing import Any

from .broker_state import BrokerState
from .frames import Decoder, Frame, FrameError, encode

logger = logging.getLogger("django_txmsg.testing.peer")


class Peer(asyncio.Protocol):
    """The broker's end of one connection. A subclass answers the client's frames."""

    def __init__(self, broker: BrokerState) -> None:
        """Create a peer that waits for its connection."""
        self.broker = broker
        #: The number of the connection, from 1.
        self.number = 0
        self.stalled = False
        self.closed = False
        self.last_read = time.monotonic()
        self.decoder = Decoder()
        self._beat_every = self._beats_due = 0.0
        self._backlog: deque[Frame] = deque()
        self._out: deque[bytes] = deque()
        self._leaving = False
        self._draining = False
        self._pausing = False

    @property
    def heartbeats(self) -> int:
        """The number of heartbeats that the client has sent."""
        return self.decoder.heartbeats

    @property
    def ending(self) -> bool:
        """Whether the connection has ended, or will end as soon as the queued bytes are
        written. The client's frames are then ignored."""
        return self.closed or self._leaving

    def arrive(self, frame: Frame) -> None:
        """Handle the next frame."""
        raise NotImplementedError

    def ended(self) -> None:
        """Clean up after the end of the connection."""
        raise NotImplementedError

    # -- calls of the event loop ----------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Begin the conversation."""
        self._transport: asyncio.Transport = transport
        self.broker.loop.transports.add(transport)
        self.broker.loop.attempt(partial(self.broker.accept, self))

    def data_received(self, data: bytes) -> None:
        """Handle the frames that these bytes complete."""
        self.broker.loop.attempt(partial(self._read, data))

    def eof_received(self) -> None:
        """End the connection, which the client has closed."""
        reason = "the client closed the connection"
        self.broker.loop.attempt(partial(self.end, reason))

    def connection_lost(self, error: Exception | None) -> None:
        """End the connection, which has failed unless it has ended already."""
        self.broker.loop.transports.discard(self._transport)
        reason = f"the client's socket failed: {error}"
        self.broker.loop.attempt(partial(self.end, reason))

    # -- with the lock held ---------------------------------------------------------

    def _read(self, data: bytes) -> None:
        if self.ending:
            return
        self.last_read = time.monotonic()
        try:
            self._backlog.extend(self.decoder.feed(data))
        except FrameError as error:
            self.protest(str(error))
            return
        self.work()
        self.broker.changed.notify_all()

    def work(self) -> None:
        """Handle the frames that have arrived. Stop if a frame stalls or ends the
        connection."""
        while self._backlog and not (self.stalled or self.ending):
            self.arrive(self._backlog.popleft())

    def put_back(self, frame: Frame) -> None:
        """Put this frame back, so that it is handled again before all other frames."""
        self._backlog.appendleft(frame)

    def _go_on(self) -> None:
        """Read and write what the script allows now. Runs on the loop's thread."""
        if self.closed:
            return
        if self.stalled:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
        while self._out and not self._pausing:
            self._transport.write(self._out.popleft())
            if self.broker.pause and self._out:
                self._pausing = True
                self.broker.loop.call(self._after_pause, self.broker.pause)
        if self._leaving:
            self._say_goodbye()

    def _after_pause(self) -> None:
        self._pausing = False
        self._go_on()

    # -- calls of the conversation and the script, with the lock held --------------

    def send(self, frame: Frame) -> None:
        """Queue a frame. The script decides how its bytes are split."""
        self.write(encode(frame))

    def write(self, data: bytes) -> None:
        """Queue raw bytes, which need not be a frame."""
        if not (self.closed or self._draining):
            size = self.broker.piece or len(data) or 1
            self._out.extend(data[i : i + size] for i in range(0, len(data), size))
            self.broker.loop.call(self._go_on)

    def agree_heartbeats(self, wish: str) -> tuple[int, int]:
        """Agree with the client on the heartbeat intervals, and start the timers.
        Return the broker's two intervals in milliseconds."""
        client_sends, client_wants = (int(part) for part in wish.split(","))
        sends, wants = self.broker.heart_beat or (client_wants, client_sends)
        if sends and client_wants:
            self._beat_every = max(sends, client_wants) / 1000
            self.broker.loop.call(self._beat, self._beat_every)
        if wants and client_sends:
            self._beats_due = max(wants, client_sends) / 1000
            self.broker.loop.call(self._check_beats, self._beats_due)
        return sends, wants

    def _beat(self) -> None:
        if self.ending:
            return
        if not (self.broker.silent or self._out):
            self.write(b"\n")
        self.broker.loop.call(self._beat, self._beat_every)

    def _check_beats(self) -> None:
        if self.ending:
            return
        # Generous: only a client that sends none at all fails the test.
        limit = 3 * self._beats_due + 1.0
        if not self.stalled and time.monotonic() - self.last_read > limit:
            self.protest(f"no heartbeat for {limit:g} s")
            return
        self.broker.loop.call(self._check_beats, self._beats_due)

    def stall(self) -> None:
        """Stop reading."""
        self.stalled = True
        self.broker.loop.call(self._go_on)

    def resume(self) -> None:
        """Read again."""
        self.stalled = False
        self.last_read = time.monotonic()
        self.work()
        self.broker.loop.call(self._go_on)

    def cut(self, *, reset: bool = False) -> None:
        """End the connection. With ``reset``, send RST immediately. Otherwise, first
        write the queued bytes."""
        if reset:
            self.end("cut by the script", reset=reset)
        else:
            self.hang_up()

    def protest(self, what: str) -> None:
        """Report a violation of the protocol to the client and to the test. Then close
        the connection."""
        self.broker.violations.append(f"connection {self.number}: {what}")
        self.send(Frame("ERROR", {"message": what}))
        self.hang_up()

    def hang_up(self) -> None:
        """Write the queued bytes, then end the connection."""
        if not self.ending:
            self._leaving = True
            self.broker.loop.call(lambda: self.end("it took too long"), 2.0)
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        if not (self._out or self._draining or self.closed):
            self._draining = True
            self.broker.loop.call(self._drain)
            self._over()

    def _drain(self) -> None:
        # Closing with unread bytes resets the connection, and the client may never see
        # what was written last. So read on, discarding everything, until the client
        # closes too.
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def end(self, reason: str, *, reset: bool = False) -> None:
        """End the connection now. Queued bytes are lost."""
        if self.closed:
            return
        logger.debug("connection %d ends: %s", self.number, reason)
        self.closed = True
        if reset:
            self._transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        self.broker.loop.call(self._transport.abort)
        self._over()

    def _over(self) -> None:
        self.ended()
        self.broker.forget(self)
