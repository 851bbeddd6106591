"""One transaction on the scripted broker, until its COMMIT or ABORT."""

from __future__ import annotations

from dataclasses import dataclass, field

from .frames import Frame
from .script import Rule
from .store import StoredMessage, Subscription


@dataclass(frozen=True, slots=True)
class Kept:
    """A frame that is executed at COMMIT, and the rule that modifies its answer."""

    frame: Frame
    rule: Rule | None


@dataclass(slots=True, eq=False)
class Transaction:
    """The effects of COMMIT: messages stored, others settled, frames replayed."""

    sends: list[StoredMessage] = field(default_factory=list)
    settles: list[tuple[Subscription, str]] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    #: A frame of it was refused in a way that makes COMMIT fail.
    spoilt: bool = False

    def keep(self, frame: Frame, rule: Rule | None) -> None:
        """Keep a frame unread until COMMIT, which then handles it outside any
        transaction."""
        headers = {k: v for k, v in frame.headers.items() if k != "transaction"}
        self.kept.append(Kept(Frame(frame.command, headers, frame.body), rule))
