"""The protocol's state on one connection of the scripted broker."""

from __future__ import annotations

from .peer import Peer
from .store import Subscription
from .transaction import Kept, Transaction


class Session:
    """The agreed version, subscriptions and open transactions of a client."""

    def __init__(self, peer: Peer) -> None:
        """Wait for CONNECT."""
        self.peer = peer
        self.broker = peer.broker
        self.profile = peer.broker.profile
        #: The version agreed, once the client is connected.
        self.version: str | None = None
        self.client_id = ""
        self.subscriptions: dict[str, Subscription] = {}
        self.transactions: dict[str, Transaction] = {}
        #: Subscriptions ended by the client whose unacknowledged messages still count
        #: as delivered.
        self.ended_subscriptions: list[Subscription] = []
        #: Topic and name of subscriptions that end with the connection.
        self.temporary: list[tuple[str, str]] = []
        #: Frames of a transaction that are obeyed once its COMMIT is answered.
        self.replay: list[Kept] = []

    def ended(self) -> None:
        """Abort open transactions and release unacknowledged messages to others."""
        self.transactions.clear()
        subscriptions, self.subscriptions = self.subscriptions, {}
        for subscription in [*subscriptions.values(), *self.ended_subscriptions]:
            subscription.stop()
            subscription.give_back()
        self.ended_subscriptions.clear()
        for topic, name in self.temporary:
            self.broker.store.forget(topic, name)
        self.temporary.clear()
