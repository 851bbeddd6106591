"""A transaction on the broker, from its first frame to its commit or abort.

Stages use a transaction to send and acknowledge as one unit. COMMIT is written only
after the broker has handled every frame of the transaction. Otherwise the broker might
refuse one of the messages and still commit the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from . import frames
from .errors import (
    ConnectionLostError,
    MessagingError,
    RequestRejectedError,
    SendRejectedError,
    TransactionInDoubtError,
    TransactionRolledBackError,
)
from .ledger import Pending, State
from .link import Link, Request
from .message import Message

#: How long after a refused COMMIT the reason may still arrive.
_REASON_SECONDS = 0.5


class Confirm(Pending):
    """A send for which RabbitMQ returns the receipt only after COMMIT."""

    __slots__ = ()

    is_send = True

    def on_settled(self) -> None:
        assert self.owner is not None
        self.owner.confirmed(self)


class Transaction:
    """A transaction. It begins with its first frame and ends by ``commit`` or
    ``abort``."""

    def __init__(self, link: Link) -> None:
        """Choose a unique name. BEGIN is written together with the first frame."""
        self.link = link
        self.name = link.next_name("tx-")
        self.received: list[Message] = []
        #: Sends whose receipt comes only after COMMIT (RabbitMQ).
        self.confirms: set[Pending] = set()
        #: How many sends with a listener its session had when the end began.
        self.last_send = 0
        self.error: MessagingError | None = None
        #: Whether the broker has refused COMMIT, and still keeps the transaction.
        self.left_open = False
        self._commit: Request | None = None
        self._begun = False
        self._has_loose_frames = False

    @property
    def committing(self) -> Pending | None:
        """The COMMIT frame, or None if COMMIT is not queued yet."""
        commit = self._commit
        return commit if commit is not None and commit.sequence else None

    @property
    def is_empty(self) -> bool:
        """Whether the transaction has nothing to commit."""
        return not self._begun and not self.received

    def begin(self) -> None:
        """Queue BEGIN before the transaction's first frame. The caller holds the
        lock."""
        if not self._begun:
            self._begun = True
            self.loose(frames.encode("BEGIN", {"transaction": self.name}))

    def loose(self, data: bytes) -> None:
        """Queue frames of this transaction that ask for no receipt. The caller holds
        the lock."""
        self._has_loose_frames = True
        self.link.ledger.note_loose(self)
        self.link.writer.put(data)

    def fail(self, error: MessagingError) -> None:
        """Record an error. The transaction cannot be committed after that."""
        self.error = self.error or error

    def spoil(self, broker_message: str) -> None:
        """Record that the broker has refused a frame of the transaction, by an ERROR
        frame without a receipt id."""
        self.fail(
            SendRejectedError(
                f"{self.link.description} refused a frame of transaction "
                f"{self.name}: {broker_message}",
                broker_message=broker_message,
            )
        )

    def new_confirm(self, what: str) -> Pending:
        """Create the pending frame of a send whose receipt comes only after COMMIT."""
        # Its time-out begins when COMMIT is written.
        confirm = Confirm(what, float("inf"), self)
        confirm.receipt = self.link.ledger.new_receipt()
        self.confirms.add(confirm)
        return confirm

    def confirmed(self, confirm: Pending) -> None:
        """Record that the outcome of a send is known."""
        self.confirms.discard(confirm)
        if confirm.error is not None:
            self.fail(confirm.error)
        if not self.confirms:
            self.link.changed.notify_all()

    def commit(self, patience: Callable[[], float], *, hurried: bool = False) -> None:
        """Commit on the broker. If an earlier call was interrupted, continue it.
        ``patience`` returns how long the next step may wait. With ``hurried``,
        disconnect if the broker does not answer in time, instead of waiting as long
        again for the answer to ABORT.

        Raises ``TransactionRolledBackError`` if the transaction is rolled back. Raises
        ``TransactionInDoubtError`` if COMMIT was written and the broker did not answer,
        or if the received messages of a committed transaction are not acknowledged.
        """
        acks = [message.ack_id for message in self.received if message.ack_id]
        joined = self.link.dialect.acks_join_transaction
        try:
            if self.committing is None:
                self._prove_frames(acks if joined else [], patience, hurried)
            if self._begun:
                self._finish(patience)
        except ConnectionLostError as error:
            raise self._rolled_back(error) from error
        if joined:
            return
        try:
            for ack_id in acks:
                self.link.post(frames.encode("ACK", {"id": ack_id}))
        except MessagingError as error:
            raise TransactionInDoubtError(
                f"Transaction {self.name} is committed, but its received messages are "
                f"not acknowledged: {error}"
            ) from error

    def _prove_frames(
        self, ack_ids: list[str], patience: Callable[[], float], hurried: bool
    ) -> None:
        """Wait until the broker has handled all frames of the transaction. If a frame
        has failed, abort the transaction and raise."""
        if ack_ids and self.error is None:
            with self.link.lock, self.link.whole():
                self.link.check_alive()
                self.begin()
                for ack_id in ack_ids:
                    headers = {"id": ack_id, "transaction": self.name}
                    self.loose(frames.encode("ACK", headers))
        answers = self.link.dialect.answers_inside_transaction
        if self._has_loose_frames and answers and self.error is None:
            try:
                self.link.barrier(timeout=patience(), owner=self).wait()
            except MessagingError as error:
                self.fail(error)
                if hurried and isinstance(error, TimeoutError):
                    self.link.lose(f"transaction {self.name}: {error}", silent=True)
        if self.error is not None:
            self.abort(patience())
            raise self._rolled_back(self.error) from self.error

    def _finish(self, patience: Callable[[], float]) -> None:
        timeout = patience()
        give_up = time.monotonic() + timeout
        if self.committing is None:
            with self.link.lock:
                self._start_clocks(give_up)
                # Set before it is queued, so that it counts even if this is
                # interrupted.
                commit = self._commit = self._request("COMMIT", timeout)
                self.link.submit(commit, "COMMIT", {"transaction": self.name})
        assert self._commit is not None
        try:
            self._commit.wait()
            if not self.link.dialect.commit_proves_sends:
                self._wait_for_confirms(give_up)
        except MessagingError as error:
            raise self._outcome(error, patience()) from error

    def _request(self, command: str, timeout: float) -> Request:
        what = f"{command} of transaction {self.name}"
        return Request(self.link, what, timeout, owner=self)

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

    def _outcome(self, error: MessagingError, timeout: float) -> MessagingError:
        assert self._commit is not None
        refused = isinstance(error, RequestRejectedError)
        if refused and self.link.dialect.commit_proves_sends:
            self._wait_for_reason()
            self.left_open = True
        elif not self._commit.written:
            self.abort(timeout)
        else:
            # Further sends could otherwise join a transaction that is no longer
            # tracked.
            silent = isinstance(error, TimeoutError)
            self.link.lose(
                f"transaction {self.name} is in doubt: {error}", silent=silent
            )
            return TransactionInDoubtError(
                f"Transaction {self.name} is in doubt: {error} Receive and send again "
                "on a new connection; the message ids let receivers drop duplicates."
            )
        return self._rolled_back(self.error or error)

    def _rolled_back(self, error: MessagingError) -> TransactionRolledBackError:
        return TransactionRolledBackError(
            f"Transaction {self.name} is rolled back: {error}"
        )

    def _wait_for_reason(self) -> None:
        """Wait for the ERROR in which ActiveMQ explains why it refused a SEND. This
        ERROR may arrive after the answer to COMMIT.

        The ERROR has no receipt id. If this transaction did not wait for the ERROR, the
        client would attribute the ERROR to another transaction.
        """
        with self.link.lock:
            self.link.changed.wait_for(
                lambda: self.error or self.link.error, _REASON_SECONDS
            )
            self.link.ledger.refused.remove(self)

    def free(self) -> None:
        """Disconnect if the broker has refused COMMIT and still keeps this transaction.

        If ActiveMQ refuses a COMMIT, it forgets the transaction's name, so ABORT cannot
        end the transaction. Until the connection ends, the transaction's messages take
        up space in their queues. Until then, no other transaction can acknowledge the
        messages that this transaction has acknowledged.
        """
        if self.left_open:
            self.link.lose(f"it would keep transaction {self.name} open: {self.error}")

    def abort(self, timeout: float) -> None:
        """Abort the transaction on the broker. If the connection is lost, no request is
        necessary, because the broker then aborts the transaction."""
        if self._begun:
            try:
                abort = self._request("ABORT", timeout)
                self.link.submit(abort, "ABORT", {"transaction": self.name})
                abort.wait()
            except ConnectionLostError:
                pass  # a broker aborts what was open on a connection that ended
            except MessagingError as error:
                reason = f"transaction {self.name} did not abort: {error}"
                self.link.lose(reason, silent=isinstance(error, TimeoutError))
        with self.link.lock:
            for confirm in list(self.confirms):
                self.link.ledger.settle(confirm, State.CANCELLED, None)
