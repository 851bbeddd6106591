"""Handles and answers the frames of one client of the scripted broker.

Each frame is recorded. If a rule of the script selects the frame, the rule decides how
the frame is handled. Otherwise the frame is handled as the imitated broker would handle
it. ``COMMANDS`` maps each STOMP command to its function.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from .broker_state import BrokerState, StoredMessage, Subscription
from .frames import Frame
from .peer import Peer
from .script import PLAIN, Held, Rule, Verb


@dataclass(slots=True, eq=False)
class Transaction:
    """The open work of a transaction: messages to store, deliveries to settle and
    frames to handle at COMMIT, each with the rule that modifies its answer."""

    sends: list[StoredMessage] = field(default_factory=list)
    settles: list[tuple[Subscription, str]] = field(default_factory=list)
    kept: list[tuple[Frame, Rule]] = field(default_factory=list)
    #: A frame of it was refused in a way that makes COMMIT fail.
    spoilt: bool = False

    def keep(self, frame: Frame, rule: Rule) -> None:
        """Keep a frame until COMMIT, and then handle it like a frame without a
        transaction."""
        headers = {k: v for k, v in frame.headers.items() if k != "transaction"}
        self.kept.append((Frame(frame.command, headers, frame.body), rule))


#: Headers of SEND that belong to the protocol and do not reach the receiver.
_NOT_PASSED_ON = frozenset(
    {"receipt", "transaction", "message-id", "redelivered", "subscription", "ack"}
)


class RefusedError(Exception):
    """The broker refuses a frame. The text of this exception is sent in the ERROR
    frame."""


def _connect(talk: Conversation, frame: Frame) -> None:
    if talk.connected:
        raise RefusedError("already connected")
    if "1.2" not in frame.headers.get("accept-version", "1.0").split(","):
        raise RefusedError("Supported versions are 1.2")
    hosts = talk.profile.virtual_hosts
    if hosts is not None and frame.headers.get("host", "/") not in hosts:
        raise RefusedError(f"Virtual host '{frame['host']}' access denied")
    login, passcode = frame.headers.get("login", ""), frame.headers.get("passcode", "")
    users = talk.broker.users
    if users is not None and (login not in users or users[login] != passcode):
        raise RefusedError(f"User name [{login}] or password is invalid.")
    talk.client_id = frame.headers.get("client-id", "")
    sends, wants = talk.agree_heartbeats(frame.headers.get("heart-beat", "0,0"))
    headers = {
        "version": "1.2",
        "server": talk.profile.server,
        "session": f"scripted-{talk.number}",
        "heart-beat": f"{sends},{wants}",
    }
    talk.send(Frame("CONNECTED", headers))
    talk.connected = True


def _send(talk: Conversation, frame: Frame) -> None:
    if not frame.destination:
        raise RefusedError("SEND without a destination")
    headers = {k: v for k, v in frame.headers.items() if k not in _NOT_PASSED_ON}
    if frame.receipt is not None and talk.profile.passes_receipt_on:
        headers["receipt"] = frame.receipt
    expires_at = None
    if talk.profile.expires_relative and "expiration" in headers:
        expires_at = time.time() + int(headers["expiration"]) / 1000
    elif not talk.profile.expires_relative and int(headers.get("expires", 0)):
        expires_at = int(headers["expires"]) / 1000
    message = StoredMessage(
        frame.destination, headers, frame.body, expires_at=expires_at
    )
    if frame.transaction is None:
        _store(talk, message)
    else:
        _transaction(talk, frame).sends.append(message)


def _store(talk: Conversation, message: StoredMessage) -> None:
    headers = message.headers
    delay = headers.get(talk.profile.delay_header or "")
    if talk.profile.expires_relative and "x-dead-letter-routing-key" in headers:
        # An expired message in this queue goes to another one, by the queue's
        # arguments.
        kind = "topic" if headers["x-dead-letter-exchange"] == "amq.topic" else "queue"
        name = headers["x-dead-letter-routing-key"]
        delay = headers["expiration"]
        message = StoredMessage(f"/{kind}/{name}", headers, message.body)
    if delay is None:
        talk.broker.store_message(message)
    else:
        store = partial(talk.broker.store_message, message)
        talk.broker.loop.call(store, int(delay) / 1000)


def _subscribe(talk: Conversation, frame: Frame) -> None:
    name = frame.headers.get("id")
    if not name or not frame.destination:
        raise RefusedError("SUBSCRIBE needs an id and a destination")
    if name in talk.subscriptions:
        raise RefusedError(f"There already is a subscription for: {name}")
    if frame.headers.get("ack") != "client-individual":
        raise RefusedError("The only supported ack mode is client-individual")
    profile, store = talk.profile, talk.broker.store
    prefetch: int | None = profile.default_prefetch
    if profile.prefetch_header in frame.headers:
        prefetch = int(frame.headers[profile.prefetch_header])
        if prefetch == profile.unlimited_prefetch:
            prefetch = None
    if talk.broker.is_topic(frame.headers):
        durable = frame.headers.get(profile.durable_header)
        if durable is None:
            own = f"{talk.number}:{name}"
            talk.temporary.append((frame.destination, own))
        elif profile.durable_needs_client_id and not talk.client_id:
            raise RefusedError("A durable subscription needs a client-id on CONNECT")
        else:
            own = f"{talk.client_id}:{durable}"
        queue = store.topic_queue(frame.destination, own)
    else:
        queue = store.queue(frame.destination)
    deliver = partial(_deliver, talk)
    subscription = Subscription(
        name, queue, prefetch, deliver, profile.prefetch_in_bytes
    )
    talk.subscriptions[name] = subscription
    subscription.start()


def _deliver(
    talk: Conversation, subscription: Subscription, ack_id: str, message: StoredMessage
) -> None:
    headers = {
        **message.headers,
        "destination": message.destination,
        "subscription": subscription.name,
        "message-id": f"ID:scripted-{message.number}",
        "content-length": str(len(message.body)),
        "ack": ack_id,
    }
    if message.redelivered or talk.profile.always_says_redelivered:
        headers["redelivered"] = str(message.redelivered).lower()
    talk.send(Frame("MESSAGE", headers, message.body))


def _unsubscribe(talk: Conversation, frame: Frame) -> None:
    name = frame.headers.get("id", "")
    durable = frame.headers.get(talk.profile.durable_header)
    subscription = talk.subscriptions.pop(name, None)
    if subscription is None:
        if durable is None or not talk.profile.durable_needs_client_id:
            raise RefusedError(f"No subscription matched: {name}")
        # An inactive durable subscription is deleted by its name.
        talk.broker.store.forget(frame.destination, f"{talk.client_id}:{durable}")
        return
    subscription.stop()
    if talk.profile.unsubscribe_gives_back:
        subscription.give_back()
    else:
        talk.ended_subscriptions.append(subscription)
    if durable is not None:
        talk.broker.store.forget(frame.destination, f"{talk.client_id}:{durable}")


def _acknowledge(talk: Conversation, frame: Frame) -> None:
    ack_id = frame.headers.get("id", "")
    in_transactions = {one[1] for t in talk.transactions.values() for one in t.settles}
    unsettled = (s for s in talk.subscriptions.values() if ack_id in s.pending)
    subscription = next(unsettled, None)
    if subscription is None or ack_id in in_transactions:
        talk.broker.violations.append(
            f"connection {talk.number}: ACK of {ack_id!r}, "
            "which is not delivered, or settled already"
        )
        raise RefusedError(f"Unexpected ACK received for message-id [{ack_id}]")
    if frame.transaction is not None:
        transaction = _transaction(talk, frame)
        if talk.profile.acks_join_transaction:
            transaction.settles.append((subscription, ack_id))
            return
    subscription.settle(ack_id)


def _transaction(talk: Conversation, frame: Frame) -> Transaction:
    name = frame.transaction or ""
    if name not in talk.transactions:
        raise RefusedError(f"Invalid transaction id: {name}")
    return talk.transactions[name]


def _begin(talk: Conversation, frame: Frame) -> None:
    name = frame.transaction
    if not name or name in talk.transactions:
        raise RefusedError(f"The transaction was already started: {name}")
    talk.transactions[name] = Transaction()


def _commit(talk: Conversation, frame: Frame) -> None:
    transaction = _transaction(talk, frame)
    del talk.transactions[frame["transaction"]]
    if transaction.spoilt:
        raise RefusedError("Transaction rolled back: a frame of it was refused")
    for message in transaction.sends:
        _store(talk, message)
    for subscription, ack_id in transaction.settles:
        if ack_id in subscription.pending:
            subscription.settle(ack_id)
    talk.replay = transaction.kept


def _abort(talk: Conversation, frame: Frame) -> None:
    _transaction(talk, frame)
    del talk.transactions[frame["transaction"]]


def _disconnect(talk: Conversation, frame: Frame) -> None:
    """Do nothing here, because ``Conversation`` closes the connection after the
    receipt."""


COMMANDS: dict[str, Callable[[Conversation, Frame], None]] = {
    "CONNECT": _connect,
    "STOMP": _connect,
    "SEND": _send,
    "SUBSCRIBE": _subscribe,
    "UNSUBSCRIBE": _unsubscribe,
    "ACK": _acknowledge,
    "BEGIN": _begin,
    "COMMIT": _commit,
    "ABORT": _abort,
    "DISCONNECT": _disconnect,
}


class Conversation(Peer):
    """A connection that answers each frame of its client, with the client's
    subscriptions and open transactions."""

    def __init__(self, broker: BrokerState) -> None:
        """Create a conversation that waits for CONNECT."""
        super().__init__(broker)
        self.profile = broker.profile
        self.connected = False
        self.client_id = ""
        self.subscriptions: dict[str, Subscription] = {}
        self.transactions: dict[str, Transaction] = {}
        #: Subscriptions ended by the client whose unacknowledged messages still count
        #: as delivered.
        self.ended_subscriptions: list[Subscription] = []
        #: Topic and name of subscriptions that end with the connection.
        self.temporary: list[tuple[str, str]] = []
        #: Frames of a transaction that are obeyed once its COMMIT is answered.
        self.replay: list[tuple[Frame, Rule]] = []

    def ended(self) -> None:
        """Abort the open transactions, and make its unacknowledged
        messages available to other clients."""
        self.transactions.clear()
        subscriptions, self.subscriptions = self.subscriptions, {}
        for subscription in [*subscriptions.values(), *self.ended_subscriptions]:
            subscription.stop()
            subscription.give_back()
        self.ended_subscriptions.clear()
        for topic, name in self.temporary:
            self.broker.store.forget(topic, name)
        self.temporary.clear()

    def arrive(self, frame: Frame) -> None:
        """Record a frame, and answer it according to the script or the profile."""
        rule = self.broker.script.rule_for(frame)
        if rule.verb is Verb.STALL:
            self.put_back(frame)
            self.stall()
            return
        self.broker.record(self.number, frame)
        if rule.verb is Verb.CALL:
            rule.call(self, frame)
        else:
            self.handle(frame, rule)

    def handle(self, frame: Frame, rule: Rule = PLAIN) -> None:
        """Handle a frame according to the profile. The rule may modify the answer."""
        transaction = self.transactions.get(frame.transaction or "")
        replays = self.profile.replays_transactions
        in_it = frame.command in {"SEND", "ACK"}
        if transaction is not None and replays and in_it:
            transaction.keep(frame, rule)
        elif rule.verb is Verb.PARK:
            parked = Held(frame, lambda: self._answer(frame, PLAIN))
            self.broker.script.hold(rule, parked)
        else:
            self._answer(frame, rule)
        if rule.verb is Verb.CALL_AFTER:
            rule.call(self, frame)

    def _answer(self, frame: Frame, rule: Rule) -> None:
        if self.ending:
            return
        if rule.verb is Verb.CALL_AT_COMMIT:
            rule.call(self, frame)
            return
        if not self.connected and frame.command not in {"CONNECT", "STOMP"}:
            self.protest(f"{frame.command} before CONNECT")
            return
        try:
            if frame.command not in COMMANDS:
                raise RefusedError(f"Unknown STOMP action: {frame.command}")
            COMMANDS[frame.command](self, frame)
        except (RefusedError, ValueError) as refused:
            self.refuse(frame, str(refused))
            return
        if self.connected:
            self._receipt(frame, rule)
        replay, self.replay = self.replay, []
        for held in replay:
            self._answer(*held)
        if frame.command == "DISCONNECT" and rule.verb is not Verb.HOLD:
            self.hang_up()

    def _receipt(self, frame: Frame, rule: Rule) -> None:
        """Send the receipt that a frame has asked for. A rule may hold, drop or repeat
        the receipt."""
        if frame.receipt is None or frame.command in {"CONNECT", "STOMP"}:
            return
        answer = Frame("RECEIPT", {"receipt-id": frame.receipt})
        if rule.verb is Verb.HOLD:
            self.broker.script.hold(rule, Held(frame, lambda: self.send(answer)))
            return
        for _ in range(rule.copies):
            self.send(answer)

    def refuse(
        self,
        frame: Frame,
        message: str,
        detail: str = "",
        *,
        names_receipt: bool | None = None,
        closes: bool | None = None,
    ) -> None:
        """Answer a frame with ERROR. The arguments `names_receipt` and `closes`
        override the profile."""
        if names_receipt is None:
            names_receipt = self.profile.error_names_receipt
        if closes is None:
            closes = self.profile.error_closes
        body = detail.encode()
        headers = {"message": message, "content-type": "text/plain"}
        headers["content-length"] = str(len(body))
        if names_receipt and frame.receipt is not None:
            headers["receipt-id"] = frame.receipt
        transaction = self.transactions.get(frame.transaction or "")
        if transaction is not None and frame.receipt is None:
            transaction.spoilt = self.profile.silent_error_spoils_transaction
        self.send(Frame("ERROR", headers, body))
        if closes or not self.connected:
            self.hang_up()
