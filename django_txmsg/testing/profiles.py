"""Profiles of STOMP brokers. A profile says how one broker differs from the others. The
scripted broker imitates the broker of its profile.

The profiles of ActiveMQ Classic 5.17 and RabbitMQ 3.10 were observed on these brokers.
The profile of Artemis comes from its source code and tests, without a running broker.
Derive your own profile with ``dataclasses.replace``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """The behaviour of one broker. The defaults describe ActiveMQ Classic."""

    name: str = "classic"
    #: The ``server`` header of CONNECTED.
    server: str = "ActiveMQ/5.17.2"
    #: Whether the ERROR for a refused frame has its receipt id.
    error_names_receipt: bool = True
    #: A refused SEND ends the connection.
    error_closes: bool = False
    #: Frames of a transaction are kept unread until COMMIT, and receipted after it.
    replays_transactions: bool = False
    #: A refused SEND without a receipt makes the COMMIT fail.
    silent_error_spoils_transaction: bool = True
    #: An ACK in a transaction waits for the COMMIT.
    acks_join_transaction: bool = True
    #: Topics are marked by this header (``destination-type`` on SEND), not by their
    #: name; a destination without it is a topic: a message without subscribers is
    #: receipted and dropped.
    routes_by_header: bool = False
    #: Header of SUBSCRIBE that limits the unacknowledged deliveries ...
    prefetch_header: str = "activemq.prefetchSize"
    #: ... whether it counts bytes, and the value if it is missing.
    prefetch_in_bytes: bool = False
    default_prefetch: int | None = 1000
    #: The value that means no limit.
    unlimited_prefetch: int | None = None
    #: Header of SUBSCRIBE that makes a topic's subscription durable.
    durable_header: str = "activemq.subscriptionName"
    #: A durable subscription belongs to the connection's client-id.
    durable_needs_client_id: bool = True
    #: Header of SEND that delays a delivery, in milliseconds.
    delay_header: str | None = "AMQ_SCHEDULED_DELAY"
    #: Messages expire by ``expiration`` (ms left), not by ``expires`` (epoch ms).
    expires_relative: bool = False
    #: MESSAGE has ``redelivered`` even if it is false.
    always_says_redelivered: bool = False
    #: MESSAGE has the ``receipt`` header its sender wrote.
    passes_receipt_on: bool = False
    #: Unacknowledged messages are available again at UNSUBSCRIBE, not only when the
    #: connection ends.
    unsubscribe_gives_back: bool = True
    #: The virtual hosts that exist; ``None``: the ``host`` header is ignored.
    virtual_hosts: frozenset[str] | None = None


CLASSIC = Profile()

ARTEMIS = Profile(
    name="artemis",
    server="ActiveMQ-Artemis/2.31.2 ActiveMQ Artemis Messaging Engine",
    error_closes=True,
    silent_error_spoils_transaction=False,
    acks_join_transaction=False,
    routes_by_header=True,
    prefetch_header="consumer-window-size",
    prefetch_in_bytes=True,
    default_prefetch=10_240,
    unlimited_prefetch=-1,
    durable_header="durable-subscription-name",
    always_says_redelivered=True,
)

RABBITMQ = Profile(
    name="rabbitmq",
    server="RabbitMQ/3.10.8",
    error_names_receipt=False,
    error_closes=True,
    replays_transactions=True,
    prefetch_header="prefetch-count",
    default_prefetch=None,
    unlimited_prefetch=0,
    durable_header="x-queue-name",
    durable_needs_client_id=False,
    delay_header=None,
    expires_relative=True,
    always_says_redelivered=True,
    passes_receipt_on=True,
    unsubscribe_gives_back=False,
    virtual_hosts=frozenset({"/"}),
)

PROFILES = {profile.name: profile for profile in (CLASSIC, ARTEMIS, RABBITMQ)}
