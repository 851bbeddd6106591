"""Every key of the TXMSG setting: its type, its default and what it means."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal


@dataclass(frozen=True)
class RelaySettings:
    """How stored messages leave."""

    BATCH_SIZE: int = 500
    """Messages claimed and handed over together."""
    POLL_INTERVAL: float = 1.0
    """Seconds an idle relay waits before it looks again."""
    LEASE: float = 60.0
    """Seconds that claimed messages belong to one relay."""
    LANES: int = 4
    """Broker connections that one relay process sends over side by side."""
    MAX_ATTEMPTS: int = 7
    """Dispatches of a message the broker rejects, before it is dead."""
    LINK_KEYS: bool = True
    """Whether a message with a key tells which one of that key left before it, for the
    stages that are `ordered`, here or in other services."""
    BREAKER_MAX_PAUSE: float = 30.0
    """Longest pause, in seconds, between probes of a broker that is down."""


@dataclass(frozen=True)
class RedeliverySettings:
    """The redelivery policy of stages that bring none of their own."""

    MAX_REDELIVERIES: int = 6
    INITIAL_DELAY: float = 1.0
    BACKOFF: float = 2.0
    MAX_DELAY: float = 300.0
    JITTER: float = 0.15
    MODE: Literal["blocking", "non_blocking", "broker"] = "non_blocking"


@dataclass(frozen=True)
class ConsumeSettings:
    """How messages are received and stages run."""

    PREFETCH: int = 10
    """Unacknowledged messages that the broker may send ahead to one thread."""
    POLL_INTERVAL: float = 0.5
    """Seconds between looks for parked messages that have become due."""
    STUCK_AFTER: float = 60.0
    """Seconds after which a running handler is named, with its stack, in the log."""
    THROTTLE_AFTER: int = 0
    """Failures in a row after which a stage works one message at a time; 0: never."""
    THROTTLE_PAUSE: float = 1.0
    """Seconds between messages of a throttled stage."""
    HEARTBEAT: float = 5.0
    """Seconds between a worker's heartbeats, at most 60. Three of them and 15 seconds
    after its last one, a worker counts as dead."""
    MAX_MESSAGES: int = 0
    """Deliveries after which `consume` ends in good order; 0: never."""
    MAX_MEMORY: float = 0.0
    """MiB of memory above which `consume` ends in good order; 0: never."""


@dataclass(frozen=True)
class HttpSettings:
    """The HTTP-request outbox."""

    USING: str = "default"
    """The database whose transaction a request gets."""
    CONTROL_MESSAGE: Literal["before_commit", "off"] = "before_commit"
    """Whether a request that stored messages tells its own service, before it commits,
    to look after them."""
    CONTROL_MESSAGE_ORACLE: Literal["auto", "delay"] = "auto"
    """How the control message's receiver learns whether the request has committed:
    "auto" asks PostgreSQL and waits elsewhere, "delay" always waits."""
    ON_CONTROL_FAILURE: Literal["commit", "fail"] = "commit"
    """What a request does when its control message cannot be sent: commit, and leave
    its messages to the relay in the worst case, or fail and roll back."""
    CONTROL_TIMEOUT: float = 5.0
    """Seconds that a request waits for the control message's receipt at most, with all
    that it takes to get it."""
    CONTROL_GROUP: float = 1.0
    """Seconds for which the requests of a process share a control message, on
    PostgreSQL and with a broker apart from it; 0: one for each request."""
    MAX_COMMIT_DURATION: float = 15.0
    """Seconds from the control message to the commit after which a request is given
    up where the receiver can only wait. A later commit fails with CommitTimedOut."""
    COMMIT_DELAY_INCREMENT: float = 0.5
    """Seconds before the receiver looks again; doubled each time."""
    ROLLBACK_ON_4XX: bool = False
    """Whether a response of 400 to 499 rolls back, as one of 500 and more does."""
    IDEMPOTENCY: bool = False
    """Whether an unsafe request with an Idempotency-Key is done once only."""
    IDEMPOTENCY_CALLER: str | None = None
    """Dotted path of a function from a request to who sends it, as text; None refuses
    its key. Needed where callers are known neither by Django's users and sessions nor
    by an Authorization header."""


@dataclass(frozen=True)
class RetentionSettings:
    """Days that settled rows are kept; None keeps for ever."""

    OUTBOX: float | None = 7
    INBOX: float | None = 14
    DEAD_LETTERS: float | None = None
    IDEMPOTENCY: float | None = 1


@dataclass(frozen=True)
class LakeSettings:
    """Where the data pipeline's lake is, and how it is filled and read."""

    URI: str
    """A directory, or a place in an object store."""
    STORAGE_OPTIONS: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of an object store: addresses, and keys that are not in the environment."""
    KEEP_BODIES: bool = True
    """Whether the lake has the bodies of messages."""
    READER: str | None = None
    """A replica of the default database, which jobs that only read work on: its alias
    in DATABASES or its URL."""


@dataclass(frozen=True)
class CelerySettings:
    """Tasks of Celery that are called through the outbox."""

    REQUIRE_ATOMIC: bool = False
    """Whether to call a task outside of a transaction is an error, except in a worker
    and in beat. When `False`, such a task goes to Celery's broker at once."""


@dataclass(frozen=True)
class Settings:
    """Everything under TXMSG."""

    SERVICE: str = "service"
    FORMER_SERVICES: tuple[str, ...] = ()
    """Names that this service had before. Its relay sends what was stored under
    them."""
    BROKERS: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {"default": {"URL": "database://"}}
    )
    REQUIRE_ATOMIC: bool = True
    DISPATCH_ON_COMMIT: Literal["thread", "inline", "off"] = "thread"
    NOTIFY: bool = True
    """Whether processes on PostgreSQL tell each other of new messages, by NOTIFY.
    False: all wait by polling, as on other databases."""
    LISTEN_DATABASE: str | None = None
    """The alias by which to listen in the outbox's database, where its own leads
    through a pooler that LISTEN does not pass."""
    MAX_MESSAGE_BYTES: int = 16 * 1024 * 1024
    """Largest body that send_message() takes."""
    TRANSACTION_DEFINITION: str | None = None
    """Dotted path of a function from Stage to TransactionDefinition."""
    STAGE_MIDDLEWARE: tuple[str, ...] = ()
    """Dotted paths of middlewares around the handlers of stages, outermost first."""
    DEAD_LETTER_DESTINATIONS: tuple[str, ...] = ()
    """The broker's own dead-letter queues that `consume` takes in."""
    KNOWN_DESTINATIONS: tuple[str, ...] = ()
    """What other services consume of yours, as names or patterns like "billing.*". If
    given, the overview warns of messages to any other place that no stage here
    consumes."""
    EDIT_DEAD_LETTERS: bool = False
    """Whether the admin may redeliver an edited copy."""
    MASK: str | None = None
    """Dotted path of a function that masks personal data before it is shown."""
    ORDER_PATIENCE: float = 900.0
    """Seconds after which a message that waits in an ordered stage for the one before
    it is shown, and with ordered="skip" no longer waits for one that has not come."""
    ORDER_MAX_WAITING: int = 2_000_000
    """Messages that wait for the ones before them at which an ordered stage stops
    receiving; 0: no limit."""
    ORDER_MAX_BYTES: int = 2_000_000_000
    """Their bytes, headers included, at which it does; 0: no limit."""
    CODECS: tuple[str, ...] = ()
    """Dotted paths of codecs that read and write typed bodies, asked in this order,
    before pydantic."""
    CONTRACT: str | None = None
    """Path of the committed contract; None: asyncapi.json in BASE_DIR."""
    SCHEDULE: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Recurring messages by name, each with the arguments of `every()` in capitals."""
    MISSED_TICKS: Literal["latest", "all"] = "latest"
    """Which of the ticks that no relay was there for are made up for."""
    RELAY: RelaySettings = field(default_factory=RelaySettings)
    REDELIVERY: RedeliverySettings = field(default_factory=RedeliverySettings)
    CONSUME: ConsumeSettings = field(default_factory=ConsumeSettings)
    HTTP: HttpSettings = field(default_factory=HttpSettings)
    CELERY: CelerySettings = field(default_factory=CelerySettings)
    LAKE: LakeSettings | None = None
    """The pipeline's lake: its URI, or all about it."""
    RETENTION: RetentionSettings = field(default_factory=RetentionSettings)

    @property
    def services(self) -> tuple[str, ...]:
        """The names under which this service stores messages, and has stored them."""
        return (self.SERVICE, *self.FORMER_SERVICES)


@cache
def hints(kind: type) -> dict[str, Any]:
    """Return the types of a section's keys."""
    return typing.get_type_hints(kind)
