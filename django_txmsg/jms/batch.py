"""Sends many messages, and reports for each message whether the broker has stored it.

Hop 4 of a message: the relay uses this module.

ActiveMQ syncs its journal once per transaction. So the client sends the frames to
ActiveMQ in one transaction, without receipts. A barrier checks that ActiveMQ has
accepted all frames. Then COMMIT asks for a receipt. If ActiveMQ refuses the
transaction, it stores none of the messages. The client then sends each message
separately, so that only the bad message is rejected.

RabbitMQ confirms each message after storing it. So every frame to RabbitMQ asks for a
receipt, and the client waits for many receipts together.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from ..envelope.key_order import KeyOrder
from . import destination as destinations
from .bases import SendingSession
from .destination import Destination
from .errors import (
    ConnectionLostError,
    MessageFormatError,
    MessagingError,
    SendHeldBackError,
    SendRejectedError,
    SendTimeoutError,
    TransactionInDoubtError,
    TransactionRolledBackError,
)
from .ledger import Pending
from .message import DEFAULT, Encoded, Message, transaction_line
from .transaction import Transaction

Outcomes = list[MessagingError | None]
#: An item to send: a message and its destination, or an encoded frame.
Item = tuple[str | Destination, Message] | Encoded
#: Below this a transaction costs more than the receipts it saves.
_WORTH_A_TRANSACTION = 4


class _OfMany(Pending):
    """The pending SEND frame of one message of a batch."""

    __slots__ = ("_complete", "_missing")

    is_send = True

    def __init__(
        self,
        what: str,
        timeout: float,
        missing: set[Pending],
        complete: threading.Event,
    ) -> None:
        """``missing`` is the set of the batch's frames without an outcome. The last
        outcome sets the event ``complete``."""
        super().__init__(what, timeout)
        self._missing, self._complete = missing, complete
        missing.add(self)

    def on_settled(self) -> None:
        self._missing.remove(self)
        if not self._missing:
            self._complete.set()


def send(
    session: SendingSession,
    messages: Sequence[Item],
    patience: Callable[[], float],
    *,
    isolate: bool,
    keys: Sequence[str] = (),
) -> Outcomes:
    """Send all messages and return one outcome for each, in order. ``patience``
    returns how long the next step may wait."""
    outcomes: Outcomes = [None] * len(messages)
    encoded: list[tuple[int, Encoded]] = []
    for index, item in enumerate(messages):
        if isinstance(item, Encoded):
            encoded.append((index, item))
            continue
        destination, message = item
        try:
            if not isinstance(message, Message):
                raise MessageFormatError(f"Send a jms.Message, not {message!r}.")
            target = destinations.parse(destination)
            encoded.append((index, session.encode(target, message, DEFAULT)))
        except MessagingError as error:
            rejected = SendRejectedError(f"{message!r} was not sent: {error}")
            rejected.__cause__ = error
            outcomes[index] = rejected
    in_transaction = session.link.dialect.commit_proves_sends and not isolate
    keys = keys or [""] * len(messages)
    left_open: Transaction | None = None
    for whole in _parts(session, encoded, one_by_one=isolate):
        frames = dict(whole)
        order = KeyOrder(frames, keys, outcomes, SendHeldBackError)
        part = [item for item in whole if item[0] in order.open]
        together = in_transaction and len(part) >= _WORTH_A_TRANSACTION
        transaction = Transaction(session.link) if together else None
        if transaction is None or not _ended(transaction, part, outcomes, patience):
            if transaction is not None and transaction.left_open:
                left_open = transaction
            while order.ready:
                sent = [(index, frames[index]) for index in order.ready]
                order.ready.clear()
                _with_receipts(session, sent, outcomes, patience())
                for index, _ in sent:
                    order.settle(index, outcomes[index])
        if isolate and isinstance(outcomes[whole[0][0]], SendRejectedError):
            # A broker that hangs up after its ERROR must not take down the next
            # message.
            with contextlib.suppress(MessagingError):
                session.link.barrier(timeout=patience()).wait()
    if left_open is not None:
        left_open.free()  # every message has its outcome
    for index, one in encoded:
        item = messages[index]
        if not isinstance(item, Encoded):
            item[1]._provided = one.provided
    return outcomes


def _parts(
    session: SendingSession, encoded: list[tuple[int, Encoded]], *, one_by_one: bool
) -> Iterator[list[tuple[int, Encoded]]]:
    """Split the messages into parts that fit the session's window, by number and by
    bytes."""
    options = session.link.options
    most = 1 if one_by_one else max(options.max_in_flight, 1000)
    part: list[tuple[int, Encoded]] = []
    size = 0
    for item in encoded:
        full = len(part) >= most or size + item[1].size > options.max_in_flight_bytes
        if part and full:
            yield part
            part, size = [], 0
        part.append(item)
        size += item[1].size
    if part:
        yield part


def _with_receipts(
    session: SendingSession,
    part: list[tuple[int, Encoded]],
    outcomes: Outcomes,
    timeout: float,
) -> None:
    link = session.link
    missing, complete = set[Pending](), threading.Event()
    entries = []
    for _, one in part:
        what = f"message {one.provided.message_id}"
        entry = _OfMany(what, timeout, missing, complete)
        entry.receipt = link.ledger.new_receipt()
        entries.append((one.frame(entry.receipt), entry))
    with link.lock, link.whole():
        try:
            link.check_alive()
        except MessagingError as error:
            for index, _ in part:
                outcomes[index] = error
            return
        for frame, entry in entries:
            link.put(frame, entry, at_once=len(entries) == 1)
    while not complete.wait(1.0):
        pass
    for (index, _), (_, entry) in zip(part, entries, strict=True):
        outcomes[index] = entry.error


def _ended(
    transaction: Transaction,
    part: list[tuple[int, Encoded]],
    outcomes: Outcomes,
    patience: Callable[[], float],
) -> bool:
    """Send the messages in one transaction, record the outcomes, and return True.
    Return False if the broker rolled the transaction back. The caller must then send
    each message with a receipt."""
    link = transaction.link
    line = transaction_line(transaction.name)
    data = b"".join([one.frame_with(line) for _, one in part])
    error: MessagingError
    try:
        with link.lock, link.whole():
            link.check_alive()
            transaction.begin()
            transaction.loose(data)
        transaction.commit(patience, hurried=True)
    except TransactionRolledBackError as rolled_back:
        if link.error is None:
            return False
        text = "was not stored: the connection ended before its transaction's COMMIT"
        error = link.error.unwritten(f"The message {text}: {rolled_back}")
    except ConnectionLostError as lost:
        error = lost
    except TransactionInDoubtError as in_doubt:
        error = SendTimeoutError(str(in_doubt))
    else:
        return True
    for index, _ in part:
        outcomes[index] = error
    return True
