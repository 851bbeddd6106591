"""A test's instructions for the frames that the scripted broker receives.

A rule selects frames (``broker.on("SEND", nth=3)``), and its verb says how the broker
treats these frames (``.reject("quota")``). If several rules select a frame, the broker
applies the oldest rule. A rule with ``times=2`` is used up after the broker has applied
it to two frames. Every rule counts all matching frames, even if the broker applies
another rule to them. If no rule selects a frame, the profile says how the broker treats
the frame.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from .frames import Frame


class Verb(Enum):
    """The ways in which a rule can treat a selected frame."""

    HANDLE = auto()
    HOLD = auto()
    PARK = auto()
    RECEIPT = auto()
    CALL_AT_COMMIT = auto()
    CALL_AFTER = auto()
    STALL = auto()
    CALL = auto()


class Talk(Protocol):
    """The methods of a connection that a test's function may call."""

    def send(self, frame: Frame) -> None:
        """Send a frame to the client."""

    def write(self, data: bytes) -> None:
        """Send raw bytes to the client."""

    def cut(self, *, reset: bool = False) -> None:
        """End the connection."""

    def handle(self, frame: Frame) -> None:
        """Handle a frame according to the profile."""

    def refuse(
        self,
        frame: Frame,
        message: str,
        detail: str = "",
        *,
        names_receipt: bool | None = None,
        closes: bool | None = None,
    ) -> None:
        """Answer a frame with ERROR."""


@dataclass(slots=True)
class Held:
    """A frame that the broker holds back. Until ``release`` is called, the broker does
    not handle the frame, or does not send its receipt."""

    frame: Frame
    let_go: Callable[[], None]


@dataclass(eq=False)
class Rule:
    """Selects frames. The rule's verb says how the broker treats these frames. For the
    first five fields, see ``ScriptedBroker.on``; the verb's method sets the others."""

    command: str
    nth: int | None = None
    #: How many more frames the broker may apply the rule to; None means no limit.
    times: int | None = None
    destination: str | None = None
    where: Callable[[Frame], bool] | None = None
    verb: Verb = Verb.HANDLE
    call: Callable[[Talk, Frame], object] = lambda talk, frame: None
    #: How many receipts the broker sends for a frame.
    copies: int = 1
    #: Receipts that wait to be permuted, and the number in a full window.
    group: list[Held] = field(default_factory=list)
    window: int = 0
    #: Shuffles receipts.
    order: random.Random = field(default_factory=random.Random)
    #: How many frames the rule has selected so far.
    seen: int = 0

    def matches(self, frame: Frame) -> bool:
        """Return True if the rule selects the frame. Every frame with the right
        command, destination and content counts towards ``nth``."""
        if self.command not in (frame.command, "*"):
            return False
        if self.destination is not None and frame.destination != self.destination:
            return False
        if self.where is not None and not self.where(frame):
            return False
        self.seen += 1
        return self.nth is None or self.seen == self.nth

    def decides(self) -> bool:
        """Return True if the broker must apply the rule to a frame that the rule has
        selected, and count the frame towards ``times``. Return False if the rule has no
        verb, or if ``times`` is used up."""
        if self.verb is Verb.HANDLE or self.times == 0:
            return False
        if self.times is not None:
            self.times -= 1
        return True

    # -- the verbs ----------------------------------------------------------------

    def hold_receipt(self) -> Rule:
        """Handle the frame, but hold back its receipt until ``broker.release()``."""
        return self._do(Verb.HOLD)

    def park(self) -> Rule:
        """Handle the frame only at ``broker.release()``. Later frames overtake it.

        ActiveMQ does this with a producer's frames while a queue is full.
        """
        return self._do(Verb.PARK)

    def drop_receipt(self) -> Rule:
        """Handle the frame, but never send its receipt."""
        return self.duplicate_receipt(0)

    def duplicate_receipt(self, copies: int = 2) -> Rule:
        """Handle the frame, and send its receipt ``copies`` times."""
        self.copies = copies
        return self._do(Verb.RECEIPT)

    def permute_receipts(self, window: int, *, seed: int = 0) -> Rule:
        """Hold back ``window`` receipts, then send them in random order. Repeat this
        for the next receipts.

        At the end, fewer than ``window`` receipts may remain. They wait for
        ``broker.release()``.
        """
        self.window = window
        self.order = random.Random(seed)  # noqa: S311  # to be repeatable
        return self._do(Verb.HOLD)

    def reject(
        self,
        message: str = "rejected by the script",
        detail: str = "",
        *,
        names_receipt: bool | None = None,
        closes: bool | None = None,
        at_commit: bool = False,
    ) -> Rule:
        """Answer the frame with ERROR, without handling it. The profile provides the
        defaults.

        ``names_receipt``: whether the ERROR has a receipt-id. ``closes``: whether the
        connection ends afterwards. ``at_commit``: reject a frame of a transaction only
        after the receipt for COMMIT. By then, the transaction's earlier frames have
        taken effect. RabbitMQ rejects some headers in this way.
        """

        def refuse(talk: Talk, frame: Frame) -> None:
            talk.refuse(
                frame, message, detail, names_receipt=names_receipt, closes=closes
            )

        self.call = refuse
        return self._do(Verb.CALL_AT_COMMIT if at_commit else Verb.CALL)

    def cut(self, *, reset: bool = False) -> Rule:
        """End the connection before the frame is handled. With ``reset``, send RST
        instead of FIN."""
        return self.call_with(lambda talk, frame: talk.cut(reset=reset))

    def cut_after(self, *, answered: bool = False, reset: bool = False) -> Rule:
        """Handle the frame, then end the connection. With ``answered``, send the
        receipt first."""
        self.copies = int(answered)
        self.call = lambda talk, frame: talk.cut(reset=reset)
        return self._do(Verb.CALL_AFTER)

    def stall(self) -> Rule:
        """When this frame arrives, stop reading until ``broker.resume()``."""
        return self._do(Verb.STALL)

    def call_with(self, function: Callable[[Talk, Frame], object]) -> Rule:
        """Call a function of the test with the conversation and the frame. The function
        may call ``conversation.handle(frame)``.

        The function runs in the broker's thread and must not wait.
        """
        self.call = function
        return self._do(Verb.CALL)

    def _do(self, verb: Verb) -> Rule:
        self.verb = verb
        return self


#: For frames that no rule decides about: the broker handles them by its profile.
PLAIN = Rule("*")


class Script:
    """The current rules, and the frames that the rules hold back. Use it only with the
    broker's lock held."""

    def __init__(self) -> None:
        """Start without rules."""
        self.rules: list[Rule] = []
        self.held: list[Held] = []

    def rule_for(self, frame: Frame) -> Rule:
        """Return the rule that decides about the frame, by default `PLAIN`."""
        picking = [rule for rule in self.rules if rule.matches(frame)]
        return next((rule for rule in picking if rule.decides()), PLAIN)

    def hold(self, rule: Rule, held: Held) -> None:
        """Hold back a frame or a receipt. If the rule has a window that is now full,
        release the rule's receipts in random order."""
        self.held.append(held)
        if rule.window:
            # Removed here only: a rule that is forgotten still has its receipts.
            rule.group = [one for one in (*rule.group, held) if one in self.held]
            if len(rule.group) >= rule.window:
                rule.order.shuffle(rule.group)
                self._let_go(rule.group)

    def release(self, count: int | None, order: Sequence[int]) -> int:
        """Release the held frames with the indices ``order``, in this order. If
        ``order`` is empty, release the first ``count`` held frames, or all held frames
        if ``count`` is None. Return the number of released frames."""
        taken = [self.held[index] for index in order] or self.held[:count]
        self._let_go(taken)
        return len(taken)

    def _let_go(self, taken: Sequence[Held]) -> None:
        for held in taken:
            self.held.remove(held)
        for held in taken:
            held.let_go()
