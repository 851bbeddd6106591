"""The part of a session that sends. A session keeps its sends in order, limits the
number of sends in flight, and has one transaction at a time.

Hop 4 of a message. With one lock held, the session reserves room in the window, a place
in the order of callbacks, and a place in the writer's queue. So callbacks run in the
order in which the frames are written.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType

from . import completion, frames
from .delivery import Delivery, EncodedMessage, encode_message
from .destination import Destination
from .errors import IllegalStateError
from .liveness import Closing, Liveness
from .message import Message
from .sends import Sends
from .transaction import Transaction


class SendingSession(Closing):
    """The part of a session that producers and batches use."""

    def __init__(
        self, connection: Liveness, *, transacted: bool, max_in_flight: int | None
    ) -> None:
        """Create a session of this connection, without writing to the broker."""
        link, options = connection.link, connection.link.options
        self.connection = connection
        self.link = link
        self.transacted = transacted
        self.max_in_flight = max_in_flight or options.max_in_flight
        self.sends = Sends(link, self.max_in_flight, options.max_in_flight_bytes)
        #: Whether it accepts no more sends.
        self.closing = False
        self._addresses: dict[Destination, bytes] = {}
        self._transaction: Transaction | None = None
        # Held by the thread that commits or rolls back.
        self._ending = threading.RLock()

    # -- state --------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ``IllegalStateError`` if the session or its link is closed, and in a
        forked child. Raise ``ConnectionLostError`` if the connection is lost."""
        if self.closing:
            raise IllegalStateError("The session is closed.")
        self.link.check_alive()

    def check_usable(self) -> None:
        """Raise the same errors as ``check_open``. Also raise ``IllegalStateError`` in
        a signal handler that has interrupted a send. Methods call this before they wait
        or write."""
        self.link.refuse_inside()
        self.check_open()

    def refuse_own(self, verb: str) -> None:
        """Raise ``IllegalStateError`` where waiting for the session would never end: in
        a callback of this session, in a signal handler that has interrupted the
        session, and in a forked child."""
        self.link.check_own()
        self.link.refuse_inside()
        if self._ending._is_owned():  # type: ignore[attr-defined]  # RLock's own
            raise IllegalStateError(
                f"A signal handler cannot {verb} the session whose commit() or "
                "rollback() it has interrupted. Set a flag, or an event, in it."
            )
        completion.refuse_own(self, f"{verb} its own session")

    # -- sending ------------------------------------------------------------------

    def encode(
        self,
        target: Destination,
        message: Message,
        delivery: Delivery,
        properties: Mapping[str, str] = MappingProxyType({}),
    ) -> EncodedMessage:
        """Check a message for every error, and return its encoded frame."""
        return encode_message(
            target,
            message,
            delivery,
            properties,
            dialect=self.link.dialect,
            address_lines=self._address_lines,
            transacted=self.transacted,
        )

    def _address_lines(self, target: Destination) -> bytes:
        lines = self._addresses.get(target)
        if lines is None:
            if len(self._addresses) >= 1000:
                self._addresses.clear()
            headers = self.link.dialect.send_headers(target)
            lines = self._addresses[target] = frames.header_lines(headers.items())
        return lines

    def transaction(self) -> Transaction:
        """Return the open transaction. If no transaction is open, begin a new one."""
        with self.link.lock:
            if self._transaction is None:
                self._transaction = Transaction(self.link)
            return self._transaction

    def adopt(self, message: Message) -> None:
        """Add a received message to the current transaction."""
        self.transaction().received.append(message)
