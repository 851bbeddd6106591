"""Hop 4 over AMQP: sends many messages together, and waits for the confirm of each
message.

The messages of a channel are numbered. A confirm contains a number, and covers only
that message, or all messages up to that number. If a message's queue does not exist,
the broker first returns the message, and then confirms it. The outcome is then
`Unroutable`.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile

import amqp
from amqp import spec

from ...envelope.key_order import KeyOrder
from ...errors import (
    BrokerError,
    BrokerUnavailable,
    DestinationUnavailable,
    DispatchHeld,
    DispatchUnknown,
)
from .. import refusals
from .frames import Ready
from .link import LOST, PUBLISHING, ChannelClosed, Link, error_text

Sending = KeyOrder[BrokerError]
#: Most bytes written at once.
COALESCED = 64 * 1024


class Publisher:
    """Sends messages on one channel of a link, and waits for the broker's confirms."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._channel: amqp.Channel | None = None
        self._sent = 0
        #: Number of a send -> index of its message, in the order of the sends.
        self._pending: dict[int, int] = {}
        self._settled: list[tuple[int, BrokerError | None]] = []
        self._batch: Mapping[int, Ready] = {}
        self._returned: dict[int, BrokerError] = {}
        #: Whether the broker has reported on this channel that a message could not be
        #: stored.
        self._refused = False

    def publish(
        self,
        batch: Mapping[int, Ready],
        keys: Sequence[str],
        outcomes: list[BrokerError | None],
        *,
        window: int,
        timeout: float,
        until: float | None = None,
    ) -> None:
        """Send the messages in `batch`, by their index, and write each outcome into
        `outcomes`. A message that is not in `batch` has its outcome already.

        Stop if no confirm arrives for `timeout` seconds. If `until` is given, in the
        time of `time.monotonic()`, stop then instead.

        Two messages of one key are never in flight together. The second message is sent
        only after the broker has stored the first. If the first is not stored, the
        second is not sent.
        """
        sending = KeyOrder(batch, keys, outcomes, DispatchHeld)
        self._batch = batch
        hung_up, error = False, BrokerError("")
        while sending.open and not hung_up:
            self._pending = {}
            self._settled.clear()
            self._returned.clear()
            try:
                self._link.hear()
                if self._link.blocked:
                    error = DispatchUnknown(self._link.blocked, written=False)
                    break
                self._open()
                self._pump(sending, window, timeout, until)
                silence = self._link.blocked or "no confirm came in time"
                error = DispatchUnknown(silence)
            except ChannelClosed as closed:
                error = self._closed(closed)
                hung_up = isinstance(error, DispatchUnknown)
            except (BrokerUnavailable, *LOST) as lost:
                # A broker that blocks the connection or does not answer has not hung
                # up.
                silent = isinstance(lost, TimeoutError)
                text = (self._link.why_blocked() if silent else "") or error_text(lost)
                self._link.transport.close()
                error, hung_up = DispatchUnknown(text, hung_up=not silent), not silent
            for index, known in self._settled:
                sending.settle(index, known)
            for index in list(self._pending.values()):
                sending.settle(index, error)
            if isinstance(error, DestinationUnavailable):
                self._leave(sending, error)
            if isinstance(error, DispatchUnknown):
                break
        for index in sorted(sending.open):
            outcomes[index] = DispatchUnknown(
                f"it was not sent, because another message failed: {error}",
                written=False,
                hung_up=hung_up,
            )
        self._pending, self._batch = {}, {}

    def _closed(self, closed: ChannelClosed) -> BrokerError:
        """Return the outcome that all messages in flight get, after the broker has
        closed a channel. The broker does so because of one message, and does not report
        which one."""
        if closed.channel != PUBLISHING:
            # The subscription's channel: its session must not go on waiting without it.
            self._link.transport.close()
            return DispatchUnknown(closed.text, hung_up=True)
        error = refusals.by_amqp(closed.code, closed.text)
        routes = {self._batch[index].route for index in self._pending.values()}
        of_all = isinstance(error, DestinationUnavailable) and len(routes) == 1
        if of_all or len(self._pending) == 1:
            return error
        return DispatchUnknown(closed.text, hung_up=True)

    def _leave(self, sending: Sending, error: DestinationUnavailable) -> None:
        """Skip all other messages to a destination that has just refused a message.
        Each refusal would close the channel again."""
        refused = {
            self._batch[index].route
            for index, outcome in enumerate(sending.outcomes)
            if outcome is error
        }
        for index in sorted(sending.open):
            if index in sending.open and self._batch[index].route in refused:
                sending.leave(index, error)

    def _open(self) -> None:
        """Ensure that a channel in confirm mode is open. If the broker has refused a
        message on the open channel, replace the channel."""
        if self._channel is not None and self._channel.connection is not None:
            if not self._refused:
                return
            # Once a quorum queue was full, the channel refuses messages for it until
            # the queue loses one, even if its limit was removed.
            self._channel.close()
        self._refused = False
        self._channel = self._link.channel(PUBLISHING)
        self._channel.confirm_select()
        self._sent = 0
        methods = self._link.methods
        methods[PUBLISHING, spec.Basic.Ack] = self._on_ack
        methods[PUBLISHING, spec.Basic.Nack] = self._on_nack
        self._link.contents[PUBLISHING, spec.Basic.Return] = self._on_return

    def _pump(
        self, sending: Sending, window: int, timeout: float, until: float | None
    ) -> None:
        limit = self._link.options.max_in_flight_bytes
        size, progress_at = 0, time.monotonic()
        number_of = self._pending
        while sending.ready or number_of:
            if until is not None and time.monotonic() >= until:
                return
            chunk = bytearray()
            while sending.ready and len(number_of) < window and size < limit:
                index = sending.ready.popleft()
                one = self._batch[index]
                self._sent += 1
                number_of[self._sent] = index
                chunk += one.frames
                size += len(one.frames)
                if len(chunk) >= COALESCED:
                    break
            if chunk:
                self._link.transport.write(chunk)
                progress_at = time.monotonic()
            more = sending.ready and len(number_of) < window and size < limit
            give_up = progress_at + timeout if until is None else until
            left = 0.0 if more else give_up - time.monotonic()
            self._link.read(max(0.0, left))
            if self._settled:
                progress_at = time.monotonic()
                for index, error in self._settled:
                    size -= len(self._batch[index].frames)
                    sending.settle(index, error)
                self._settled.clear()
            elif left < 0:
                return

    def _on_ack(self, arguments: bytes) -> None:
        self._settle(arguments, None)

    def _on_nack(self, arguments: bytes) -> None:
        self._refused = True
        self._settle(arguments, DestinationUnavailable(refusals.NACK))

    def _settle(self, arguments: bytes, error: BrokerError | None) -> None:
        tag, multiple = struct.unpack_from(">QB", arguments)
        tags = [tag] if tag in self._pending else []
        if multiple & 1:
            tags = list(takewhile(tag.__ge__, self._pending))
        for one in tags:
            index = self._pending.pop(one)
            self._settled.append((index, self._returned.pop(one, error)))

    def _on_return(
        self, method: bytes, properties: bytes, body: bytes, size: int
    ) -> None:
        """Record the error of a message that the broker has returned. A returned
        message has no number, so the publisher finds the message by its content."""
        code, length = struct.unpack_from(">HB", method)
        text = method[3 : 3 + length].decode(errors="replace")
        route = method[3 + length :]
        queue = route[2 + route[0] :].decode(errors="replace")
        error = Unroutable(
            f"there is no queue {queue!r}: {code} {text}. Declare it, or let the "
            f"broker's user configure it"
        )
        for exactly in (True, False):
            for tag, index in self._pending.items():
                one = self._batch[index]
                if (
                    tag not in self._returned
                    and (one.route, len(one.body)) == (route, size)
                    and one.body.startswith(body)
                    and (one.properties == properties or not exactly)
                ):
                    self._returned[tag] = error
                    return


class Unroutable(DestinationUnavailable):
    """The broker has returned the message because the queue does not exist."""
