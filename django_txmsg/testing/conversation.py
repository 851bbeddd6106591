"""One client's conversation with the scripted broker: how each frame is handled and
answered.

A frame is recorded; then the script may decide about it, otherwise the profile does: it
is executed and receipted, or refused as the imitated broker would. The commands are in
``commands.py``.
"""

from __future__ import annotations

from .commands import COMMANDS, RefusedError
from .frames import Frame
from .script import Held, Rule, Verb
from .session import Session


class Conversation(Session):
    """Takes each frame of a client, and answers."""

    def arrive(self, frame: Frame) -> None:
        """Record a frame and do what the script or profile says."""
        rule = self.broker.script.rule_for(frame)
        if rule is not None and rule.verb is Verb.STALL:
            self.peer.put_back(frame)
            self.peer.stall()
            return
        self.broker.record(self.peer.number, frame)
        if rule is not None and rule.verb is Verb.CUT:
            self.peer.cut(reset=rule.reset)
        elif rule is not None and rule.call is not None:
            rule.call(self, frame)
        else:
            self.handle(frame, rule)

    def handle(self, frame: Frame, rule: Rule | None = None) -> None:
        """Handle a frame by the profile, with its answer modified by the rule."""
        transaction = self.transactions.get(frame.transaction or "")
        replays = self.profile.replays_transactions
        refused = rule is not None and rule.verb is Verb.REJECT and not rule.at_commit
        if (
            transaction is not None
            and frame.command in {"SEND", "ACK", "NACK"}
            and (replays and not refused)
        ):
            transaction.keep(frame, rule)
        elif rule is not None and rule.verb is Verb.PARK:
            parked = Held(frame, lambda: self._answer(frame, None))
            self.broker.script.hold(rule, parked)
        else:
            self._answer(frame, rule)
        if rule is not None and rule.verb is Verb.CUT_AFTER:
            self.peer.cut(reset=rule.reset)

    def _answer(self, frame: Frame, rule: Rule | None) -> None:
        if self.peer.ending:
            return
        if rule is not None and rule.verb is Verb.REJECT:
            self.refuse(
                frame, rule.message, rule.detail,
                names_receipt=rule.names_receipt, closes=rule.closes,
            )  # fmt: skip
            return
        if self.version is None and frame.command not in {"CONNECT", "STOMP"}:
            self.protest(f"{frame.command} before CONNECT")
            return
        try:
            if frame.command not in COMMANDS:
                raise RefusedError(f"Unknown STOMP action: {frame.command}")
            COMMANDS[frame.command](self, frame)
        except (RefusedError, ValueError) as refused:
            self.refuse(frame, str(refused))
            return
        if self.version is not None:
            self._receipt(frame, rule)
        replay, self.replay = self.replay, []
        for kept in replay:
            self._answer(kept.frame, kept.rule)
        held = rule is not None and rule.verb is Verb.HOLD
        if frame.command == "DISCONNECT" and not held:
            self.peer.hang_up()

    def _receipt(self, frame: Frame, rule: Rule | None) -> None:
        """Send the receipt a frame asked for, or hold, drop or repeat it."""
        if frame.receipt is None or frame.command in {"CONNECT", "STOMP"}:
            return
        answer = Frame("RECEIPT", {"receipt-id": frame.receipt})
        copies = 1
        if rule is not None and rule.verb is Verb.HOLD:
            self.broker.script.hold(rule, Held(frame, lambda: self.peer.send(answer)))
            return
        if rule is not None and rule.verb is Verb.DUPLICATE:
            copies = rule.copies
        elif (
            rule is not None
            and not rule.answers
            and rule.verb
            in {
                Verb.DROP,
                Verb.CUT_AFTER,
            }
        ):
            return
        elif frame.command == "DISCONNECT" and self.profile.repeats_disconnect_receipt:
            copies = 2
        for _ in range(copies):
            self.peer.send(answer)

    def refuse(
        self,
        frame: Frame,
        message: str,
        detail: str = "",
        *,
        names_receipt: bool | None = None,
        closes: bool | None = None,
    ) -> None:
        """Answer a frame with ERROR, by default as the profile does."""
        if names_receipt is None:
            names_receipt = self.profile.error_names_receipt
        if closes is None:
            closes = self.version in self.profile.error_closes
        body = detail.encode()
        headers = {"message": message, "content-type": "text/plain"}
        headers["content-length"] = str(len(body))
        if names_receipt and frame.receipt is not None:
            headers["receipt-id"] = frame.receipt
        transaction = self.transactions.get(frame.transaction or "")
        if transaction is not None and frame.receipt is None:
            transaction.spoilt = self.profile.silent_error_spoils_transaction
        self.peer.send(Frame("ERROR", headers, body))
        if closes or self.version is None:
            self.peer.hang_up()

    def protest(self, what: str) -> None:
        """Report a violation of the protocol to the client and the test; then hang
        up."""
        self.broker.violations.append(f"connection {self.peer.number}: {what}")
        self.peer.send(Frame("ERROR", {"message": what}))
        self.peer.hang_up()
