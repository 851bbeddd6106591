"""The frames that wait for the broker's answer, and the outcome of each frame.

Hop 4 of a message. A pending frame gets exactly one outcome: acknowledged, rejected,
unknown or cancelled. The first of these events sets the outcome: a receipt, an ERROR
frame, the frame's deadline, the loss of the connection, or the sender's cancellation.
The ledger counts later answers and ignores them. Callers hold the connection's lock,
except for ``new_receipt``.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from .errors import (
    ConnectionLostError,
    MessagingError,
    RequestRejectedError,
    RequestTimeoutError,
    SendRejectedError,
    SendTimeoutError,
)


class State(IntEnum):
    """The state of a frame. ACKED and all later states are outcomes."""

    QUEUED = 0
    ON_WIRE = 1
    ACKED = 2
    REJECTED = 3
    UNKNOWN = 4
    CANCELLED = 5


# Looking up an attribute of an Enum is slow, and each send needs these many times.
QUEUED, ON_WIRE, ACKED = State.QUEUED, State.ON_WIRE, State.ACKED
CANCELLED = State.CANCELLED


class Owner(Protocol):
    """The interface of a transaction that owns frames waiting for answers."""

    @property
    def committing(self) -> Pending | None:
        """The COMMIT frame, or None if COMMIT is not queued yet."""

    def spoil(self, broker_message: str) -> None:
        """Record that the broker has refused a frame of the transaction, by an ERROR
        frame without a receipt id."""

    def fail(self, error: MessagingError) -> None:
        """Record that one of the transaction's frames has failed."""

    def confirmed(self, confirm: Pending) -> None:
        """Record that the outcome of a send is known."""


class Pending:
    """A frame that waits for its receipt. Subclasses handle the outcome in
    ``on_settled``. (If each send passed a callback instead, it would create a reference
    cycle.)"""

    __slots__ = (
        "deadline", "error", "owner", "receipt", "sequence", "since", "state",
        "timeout", "what", "written",
    )  # fmt: skip

    #: Whether it carries a message, which determines the class of its error.
    is_send = False

    def __init__(self, what: str, timeout: float, owner: Owner | None = None) -> None:
        """``what`` describes the frame in error texts. ``timeout`` is in seconds and
        starts when the frame is queued. ``owner`` is the frame's transaction, if
        any."""
        self.what = what
        self.timeout = timeout
        self.owner = owner
        self.since = 0.0
        self.deadline = float("inf")
        self.state = QUEUED
        self.error: MessagingError | None = None
        self.receipt = b""
        self.sequence = 0
        #: Whether it may have been written, known once it is settled.
        self.written = False

    @property
    def settled(self) -> bool:
        """Whether the frame has its outcome."""
        return self.state >= ACKED

    def on_settled(self) -> None:
        """Handle the outcome. Called exactly once, with the lock held. Subclasses must
        do no I/O here and run no user code."""


class Ledger:
    """The pending frames of one connection, in the order of sending."""

    def __init__(self, epoch: int, describe: Callable[[], str]) -> None:
        """``epoch`` is part of each receipt id, so that the ids of two connections
        differ."""
        self._prefix = b"%x-" % epoch
        self._receipts = itertools.count(1)
        self._describe = describe
        self._sequence = 0
        # Frames without a receipt that the broker may not have handled yet: (sequence,
        # owner).
        self._loose: deque[tuple[int, Owner | None]] = deque()
        self.open: dict[bytes, Pending] = {}
        self.next_deadline = float("inf")
        #: Refused transactions whose reason has not arrived yet.
        self.refused: list[Owner | None] = []
        # A reason that arrived between a barrier's receipt and the COMMIT after it, and
        # the number of frames sent until then.
        self._unclaimed = (-1, "")
        #: Receipts and errors that match no frame: late, repeated, or of another
        #: connection.
        self.ignored = 0
        #: Consecutive written frames without an answer in time, ...
        self.timeouts_in_a_row = 0
        #: ... and since when the broker has answered nothing.
        self.silent_since = 0.0
        #: Whether it has answered since, and ``silent_since`` is not updated yet.
        self.answered = False

    def new_receipt(self) -> bytes:
        """Return a new receipt id. The caller need not hold the lock."""
        return b"%s%d" % (self._prefix, next(self._receipts))

    def reserve(self, entry: Pending, now: float) -> None:
        """Add a frame that is about to be queued, and start its time-out."""
        self._sequence += 1
        entry.since = now
        entry.deadline = now + entry.timeout
        entry.sequence = self._sequence
        self.open[entry.receipt] = entry
        if entry.deadline < self.next_deadline:
            self.next_deadline = entry.deadline

    def note_loose(self, owner: Owner | None = None) -> None:
        """Record that this owner has queued frames that ask for no receipt."""
        self._sequence += 1
        if self._loose and self._loose[-1][1] is owner:
            self._loose.pop()  # a consumer that only ever acknowledges adds up to one
        self._loose.append((self._sequence, owner))

    def settle(
        self, entry: Pending, state: State, error: MessagingError | None
    ) -> bool:
        """Set the outcome of a frame, and return True. Return False if the frame
        already has an outcome. Only this method sets outcomes."""
        if entry.state >= ACKED:
            return False
        self.open.pop(entry.receipt, None)
        entry.written = entry.state is not QUEUED
        entry.state = state
        entry.error = error
        entry.on_settled()
        return True

    def receipt(self, receipt: bytes) -> None:
        """Handle a RECEIPT frame."""
        entry = self.open.get(receipt)
        if entry is None:
            self.ignored += 1
            return
        self.timeouts_in_a_row, self.answered = 0, True
        while self._loose and self._loose[0][0] < entry.sequence:
            self._loose.popleft()
        self.settle(entry, ACKED, None)

    def error(
        self,
        receipt: str,
        broker_message: str,
        *,
        names_receipts: bool,
        blames: bool = True,
    ) -> bool:
        """Handle an ERROR frame. Return False if it is unknown which frame the ERROR
        rejects. The caller must then disconnect.

        An ERROR with a receipt id rejects the frame that asked for this receipt. An
        ERROR with an unknown receipt id is ignored.

        Pass ``names_receipts`` if the broker always gives the receipt id of a frame
        that asked for a receipt. An ERROR without an id then rejects a frame that asked
        for no receipt, but does not show which one. So every transaction that may have
        sent the rejected frame fails.

        Without ``names_receipts``, the broker may omit the id for any frame. If only
        one frame is unanswered, the ERROR rejects this frame. If all unanswered frames
        belong to one transaction, the ERROR makes this transaction fail. Otherwise it
        is unknown which frame was rejected. Pass ``blames=False`` if the ERROR is not
        about a frame.
        """
        if receipt:
            entry = self.open.get(receipt.encode())
            if entry is None:
                self.ignored += 1
            else:
                self._reject(entry, broker_message)
            return True
        open_owners = [entry.owner for entry in self.open.values()]
        loose_owners = [owner for _, owner in self._loose]
        if names_receipts:
            # ActiveMQ's ERROR for a frame without receipt may even arrive after the
            # receipt of a later one: then the transaction that still waits is meant.
            if not self._spoil(
                self.refused or loose_owners or open_owners, broker_message
            ):
                self._unclaimed = (self._sequence, broker_message)
            self.ignored += 1
            return True
        if not blames:
            return False
        if len(open_owners) == 1 and not loose_owners:
            self._reject(next(iter(self.open.values())), broker_message)
            return True
        return len({*map(id, open_owners), *map(id, loose_owners)}) == 1 and bool(
            self._spoil(open_owners or loose_owners, broker_message)
        )

    def _spoil(self, owners: list[Owner | None], broker_message: str) -> int:
        """Make each transaction among the owners fail. Return the number of these
        transactions."""
        spoilt = {id(owner): owner for owner in owners if owner is not None}
        for owner in spoilt.values():
            owner.spoil(broker_message)
        return len(spoilt)

    def _reject(self, entry: Pending, broker_message: str) -> None:
        kind = SendRejectedError if entry.is_send else RequestRejectedError
        text = f"{self._describe()} refused {entry.what}: {broker_message}"
        self.settle(entry, State.REJECTED, kind(text, broker_message=broker_message))
        if entry.owner is not None and entry.owner.committing is entry:
            self.refused.append(entry.owner)
            came_at, reason = self._unclaimed
            if came_at == entry.sequence - 1:
                self._spoil([entry.owner], reason)

    def expire(self, now: float) -> None:
        """Set the outcome of frames past their deadline to unknown."""
        if now < self.next_deadline:
            return
        late = [entry for entry in self.open.values() if entry.deadline <= now]
        for entry in late:
            if entry.state is State.ON_WIRE:
                self.timeouts_in_a_row += 1
                if self.timeouts_in_a_row == 1:
                    self.silent_since = max(self.silent_since, entry.since)
            self.settle(entry, State.UNKNOWN, self._late(entry))
        self._note_deadlines()

    def _late(self, entry: Pending) -> MessagingError:
        if entry.state is State.QUEUED:  # and the writer will skip it now
            text = f"{entry.what} was not written to {self._describe()} in time."
        else:
            text = (
                f"{self._describe()} did not answer for {entry.what} in time; it may "
                "or may not have happened. Send it again with the same message id."
            )
        if entry.is_send:
            return SendTimeoutError(text, written=entry.state is not State.QUEUED)
        return RequestTimeoutError(text)

    def defer(self, now: float) -> None:
        """Restart the time-out of every pending frame."""
        for entry in self.open.values():
            if entry.deadline < (later := now + entry.timeout) < float("inf"):
                entry.deadline = later
        self._note_deadlines()

    def _note_deadlines(self) -> None:
        deadlines = [entry.deadline for entry in self.open.values()]
        self.next_deadline = min(deadlines, default=float("inf"))

    def lose(self, reason: str, broker_message: str, *, silent: bool = False) -> None:
        """Set the outcome of every pending frame to unknown, in the order of
        sending."""
        for entry in list(self.open.values()):
            text = f"{entry.what}: connection to {self._describe()} lost ({reason});"
            lost = ConnectionLostError(
                f"{text} whether it happened is unknown.",
                broker_message=broker_message,
                silent=silent,
            )
            if entry.state is QUEUED:
                lost = lost.unwritten(f"{text} it was never written.")
            self.settle(entry, State.UNKNOWN, lost)
        self._loose.clear()
