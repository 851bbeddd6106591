"""One transaction on the broker: its frames, what spoilt it, how it ended.

For stages that send and acknowledge as one unit. COMMIT is written only when the
broker is known to have handled every frame of the transaction, because a broker may
commit happily without the one message it refused or parked.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from . import frames
from .errors import (
    ConnectionLostError,
    MessagingError,
    RequestRejectedError,
    SendRejectedError,
    TransactionInDoubtError,
    TransactionRolledBackError,
)
from .ledger import Entry, State

if TYPE_CHECKING:
    from .link import Link
    from .message import Message
    from .sends import Request


#: How long after a refused COMMIT the reason may still arrive.
_REASON_SECONDS = 0.5


class Confirm(Entry):
    """A send of a transaction whose receipt comes only after COMMIT (RabbitMQ)."""

    __slots__ = ("send", "transaction")

    is_send = True

    def __init__(self, what: str, transaction: Transaction, send: Entry | None) -> None:
        """``send`` is the asynchronous send to be told earlier, if there is one."""
        super().__init__(what, float("inf"), transaction)
        self.transaction = transaction
        self.send = send

    def settled(self) -> None:
        """Count down, and pass a failure on."""
        self.transaction.confirms.discard(self)
        if self.error is not None:
            self.transaction.fail(self.error)
            if self.send is not None:
                ledger = self.transaction.link.ledger
                ledger.settle(self.send, self.state, self.error)
        if not self.transaction.confirms:
            self.transaction.link.changed.notify_all()


class Transaction:
    """Begun with its first frame, ended by ``commit`` or ``abort``."""

    def __init__(self, link: Link) -> None:
        """Take a name of its own; nothing is written yet."""
        self.link = link
        self.name = link.next_name("tx-")
        self.received: list[Message] = []
        self.confirms: set[Confirm] = set()
        self.error: MessagingError | None = None
        #: The COMMIT frame, once it is queued.
        self.committing: Request | None = None
        self._begun = False
        self._has_loose_frames = False

    def begin(self) -> None:
        """Write BEGIN before the first frame; with the lock held."""
        if not self._begun:
            self._begun = True
            self.loose(frames.encode("BEGIN", {"transaction": self.name}))

    def loose(self, data: bytes) -> None:
        """Queue frames of this transaction without receipts; with the lock held."""
        self._has_loose_frames = True
        self.link.ledger.note_loose(self)
        self.link.writer.put(data)

    def fail(self, error: MessagingError) -> None:
        """Remember why it cannot be committed."""
        self.error = self.error or error

    def spoil(self, said: str) -> None:
        """Take an ERROR frame that can only be for one of its frames."""
        self.fail(
            SendRejectedError(
                f"{self.link.description} refused a frame of transaction "
                f"{self.name}: {said}",
                broker_said=said,
            )
        )

    def settle_early(self, timeout: float) -> None:
        """Wait until RabbitMQ has taken the frames, and say so to their senders."""
        waiting = sorted(
            (confirm for confirm in self.confirms if confirm.send is not None),
            key=lambda confirm: confirm.sequence,
        )
        if not waiting:
            return
        error = self._pass_barrier(timeout)
        state = State.UNKNOWN if error else State.ACKED
        with self.link.lock:
            for confirm in waiting:
                if confirm.send is not None and confirm.state < State.ACKED:
                    self.link.ledger.settle(confirm.send, state, error)

    def _pass_barrier(self, timeout: float) -> MessagingError | None:
        """Wait until the broker has handled all frames; a failure spoils the rest."""
        try:
            self.link.barrier(timeout=timeout, owner=self).wait()
        except MessagingError as error:
            self.fail(error)
            return error
        return None

    def commit(self, timeout: float) -> None:
        """Make it happen on the broker.

        Raises ``TransactionRolledBackError`` when nothing of it happened, and
        ``TransactionInDoubtError`` when COMMIT was written and not answered.
        """
        acks = [message.ack_id for message in self.received if message.ack_id]
        joined = self.link.dialect.acks_join_transaction
        try:
            if acks and joined:
                self._acknowledge(acks)
            if self._begun:
                self._commit(timeout)
        except ConnectionLostError as error:
            raise TransactionRolledBackError(
                f"Transaction {self.name} is rolled back: {error}"
            ) from error
        for message in self.received:
            if message.consumer is not None:
                message.consumer.forget(message)
        if not joined:
            for ack_id in acks:
                self.link.post(frames.encode("ACK", {"id": ack_id}))

    def _acknowledge(self, ack_ids: list[str]) -> None:
        with self.link.lock:
            self.link.check_alive()
            self.begin()
            for ack_id in ack_ids:
                headers = {"id": ack_id, "transaction": self.name}
                self.loose(frames.encode("ACK", headers))

    def _commit(self, timeout: float) -> None:
        if self._has_loose_frames and self.link.dialect.answers_inside_transaction:
            self._pass_barrier(timeout)
        if self.error is not None:
            self.abort(timeout)
            raise TransactionRolledBackError(
                f"Transaction {self.name} is rolled back: {self.error}"
            ) from self.error
        give_up = time.monotonic() + timeout
        with self.link.lock:
            self._start_clocks(give_up)
            commit = self.committing = self._ask("COMMIT", timeout)
        try:
            commit.wait()
            if not self.link.dialect.commit_proves_sends:
                self._wait_for_confirms(give_up)
        except MessagingError as error:
            raise self._outcome(error) from error

    def _ask(self, command: str, timeout: float) -> Request:
        name = {"transaction": self.name}
        what = f"{command} of transaction {self.name}"
        return self.link.ask(command, name, timeout=timeout, owner=self, what=what)

    def _start_clocks(self, give_up: float) -> None:
        for confirm in self.confirms:
            confirm.deadline = give_up
        if self.confirms:
            ledger = self.link.ledger
            ledger.next_deadline = min(ledger.next_deadline, give_up)

    def _wait_for_confirms(self, give_up: float) -> None:
        with self.link.lock:
            while self.confirms and self.error is None:
                self.link.changed.wait(max(0.05, give_up - time.monotonic()))
        if self.error is not None:
            raise self.error

    def _outcome(self, error: MessagingError) -> MessagingError:
        unwritten = isinstance(error, ConnectionLostError) and not error.written
        refused = isinstance(error, RequestRejectedError)
        if unwritten or (refused and self.link.dialect.commit_proves_sends):
            if refused:
                self._wait_for_reason()
            return TransactionRolledBackError(
                f"Transaction {self.name} is rolled back: {self.error or error}"
            )
        # Whatever else is sent here could join the transaction nobody knows about.
        self.link.lose(f"transaction {self.name} is in doubt: {error}")
        return TransactionInDoubtError(
            f"Transaction {self.name} is in doubt: {error} Receive and send again on a "
            "new connection; the message ids let receivers drop what came twice."
        )

    def _wait_for_reason(self) -> None:
        """Let ActiveMQ's word on the refused SEND arrive, which COMMIT's may overtake.

        It names no receipt: later it could only be held against another transaction.
        """
        give_up = time.monotonic() + _REASON_SECONDS
        with self.link.lock:
            while self.error is None and self.link.error is None:
                left = give_up - time.monotonic()
                if left <= 0:
                    break
                self.link.changed.wait(left)
            self.link.ledger.refused.remove(self)

    def abort(self, timeout: float) -> None:
        """Make sure nothing of it happens; a lost connection aborts it as well."""
        if self._begun:
            try:
                self._ask("ABORT", timeout).wait()
            except ConnectionLostError:
                pass  # a broker aborts what was open on a connection that ended
            except MessagingError as error:
                self.link.lose(f"transaction {self.name} did not abort: {error}")
        with self.link.lock:
            for confirm in list(self.confirms):
                confirm.send = None
                self.link.ledger.settle(confirm, State.CANCELLED, None)

    def give_back(self) -> None:
        """Let what was received be received again."""
        for consumer in {message.consumer for message in self.received}:
            if consumer is not None:
                consumer.take_back()
