"""Hop 4's verdict: sorts the messages of a batch by the broker's answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ..errors import (
    BrokerError,
    DestinationUnavailable,
    DispatchRejected,
    DispatchUnknown,
)
from ..models.outbox_claim import Claimed


@dataclass
class Receipts:
    """The rows of one batch, by outcome."""

    #: The broker has stored them, with proof.
    stored: list[Claimed] = field(default_factory=list)
    #: Refused for themselves: they count an attempt.
    failed: list[tuple[Claimed, BrokerError]] = field(default_factory=list)
    #: Their destination takes no messages now, and why: released without an attempt.
    refused: list[tuple[Claimed, DestinationUnavailable]] = field(default_factory=list)
    #: The broker hung up on an unknown one of them: each is sent again alone.
    again: list[Claimed] = field(default_factory=list)
    #: Released unchanged.
    returned: list[Claimed] = field(default_factory=list)
    #: Whether the broker has ended the connection.
    hung_up: bool = False
    #: How many were sent without an answer.
    unknown: int = 0
    #: The reason if the broker cannot be used now because it fell silent, rather than
    #: hung up.
    silence: BrokerError | None = None

    @property
    def unavailable(self) -> dict[str, DestinationUnavailable]:
        """The destinations that take no messages now, and why."""
        return {row.destination: error for row, error in self.refused}


def judge(
    rows: Sequence[Claimed], outcomes: Sequence[BrokerError | None], *, apart: bool
) -> Receipts:
    """Sort the rows. `apart` means that each was sent after the outcome of the one
    before was known: then the broker has hung up on the one in flight."""
    found = Receipts()
    open_rows: list[Claimed] = []
    spoilt: set[str] = set()
    for row, outcome in zip(rows, outcomes, strict=True):
        if outcome is None:
            found.stored.append(row)
            continue
        if isinstance(outcome, DestinationUnavailable):
            found.refused.append((row, outcome))
            spoilt.add(row.key)
            continue
        unknown = isinstance(outcome, DispatchUnknown)
        ended = isinstance(outcome, DispatchUnknown) and outcome.hung_up
        written = isinstance(outcome, DispatchUnknown) and outcome.written
        found.unknown += written
        found.hung_up |= ended
        if isinstance(outcome, DispatchRejected) or (apart and ended and written):
            found.failed.append((row, outcome))
            spoilt.add(row.key)
        else:
            open_rows.append(row)
            if unknown and not ended:
                found.silence = found.silence or outcome
    spoilt.discard("")
    for row in open_rows:
        # Messages that follow a failed one of their key wait until that one has left.
        goes = found.hung_up and row.key not in spoilt
        (found.again if goes else found.returned).append(row)
    nothing = not (found.stored or found.failed or found.refused)
    if apart and nothing and found.again:
        # Nothing was written: sending again would not find the message.
        found.returned += found.again
        found.again = []
        found.silence = next(one for one in outcomes if one is not None)
    return found


def split(
    rows: Sequence[Claimed], destinations: Collection[str]
) -> tuple[list[Claimed], list[Claimed]]:
    """Return the rows that may be sent, and those to `destinations` with the rows that
    must follow them by key."""
    sound: list[Claimed] = []
    left: list[Claimed] = []
    keys: set[str] = set()
    for row in rows:
        if row.destination in destinations or row.key in keys:
            left.append(row)
            keys |= {row.key} - {""}
        else:
            sound.append(row)
    return sound, left
