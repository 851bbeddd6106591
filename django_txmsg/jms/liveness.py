"""Tells whether a connection still works, and which kind of broker it is connected to.

Hops 4 and 6 of a message. A connection that has lost its link never works again. The
application then opens a new connection with the factory.
"""

from __future__ import annotations

import abc
import time
from typing import TypeVar

from .dialect import Dialect
from .errors import IllegalStateError, MessagingError
from .link import Link
from .options import Options

Self = TypeVar("Self", bound="Closing")


class Closing(abc.ABC):
    """A context manager that calls `close()` at the end of its block."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the object. Further calls have no effect."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Liveness(Closing):
    """The base class of a connection. It owns the link to the broker, and knows whether
    the connection has failed or was closed. A session uses only this part of its
    connection."""

    def __init__(self, address: tuple[str, int], options: Options) -> None:
        """Connect. Raises ``ConnectionFailedError`` or ``OSError`` within the
        time-out."""
        self.address = address
        self._closing = False
        self.link = Link(address, options)

    def __repr__(self) -> str:
        """Show the address."""
        return f"<Connection to {self.address[0]}:{self.address[1]}>"

    @property
    def dialect(self) -> Dialect:
        """The dialect of the broker to which this connection was opened."""
        return self.link.dialect

    @property
    def error(self) -> MessagingError | None:
        """The error that made the connection fail, or ``None`` if the connection has
        not failed."""
        return self.link.error

    @property
    def failed(self) -> bool:
        """Whether the connection ended without a call of ``close``."""
        return self.link.error is not None

    @property
    def closed(self) -> bool:
        """Whether the connection can no longer be used."""
        return self._closing or self.failed or self.link.inherited

    @property
    def ignored_receipts(self) -> int:
        """The number of receipts and errors that arrived late, arrived twice, or
        matched no frame."""
        return self.link.ledger.ignored

    def check_usable(self) -> None:
        """Raise ``IllegalStateError``, or the error that made the connection fail."""
        self.link.check_alive()
        if self._closing:
            raise IllegalStateError("The connection is closed.")

    def ping(self, timeout: float = 5.0) -> float:
        """Check that the broker handles our frames. Return the seconds until the
        broker's answer.

        Raises ``RequestTimeoutError`` or ``ConnectionLostError``.
        """
        self.check_usable()
        began = time.monotonic()
        self.link.barrier(timeout=timeout).wait()
        return time.monotonic() - began

    def stop(self) -> None:
        """Pause all consumers, without waiting for them. Sending is not affected."""
        self._deliver(on=False)

    def start(self) -> None:
        """Resume all consumers after ``stop``."""
        self._deliver(on=True)

    def _deliver(self, *, on: bool) -> None:
        self.check_usable()
        with self.link.lock:
            self.link.delivering = on
            self.link.changed.notify_all()
