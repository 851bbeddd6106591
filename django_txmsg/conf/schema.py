"""Every key of the TXMSG setting: its type, default and meaning."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

#: The kinds of alarms, worst first: what `--fail-on` and `ALERTS["KINDS"]` may name.
KINDS = (
    "database", "no-worker", "outage", "overdue", "newer-code", "undo-stuck", "order",
    "silent", "dead", "unconsumed", "paused", "subscription",
)  # fmt: skip

#: All alarms but warnings.
BAD = "bad"


@dataclass(frozen=True)
class RelaySettings:
    """The settings of the relay, which sends stored messages."""

    BATCH_SIZE: int = 500
    """Messages claimed and dispatched together."""
    POLL_INTERVAL: float = 1.0
    """Seconds an idle relay waits before it looks again."""
    LEASE: float = 60.0
    """Seconds that claimed messages belong to one relay."""
    LANES: int = 4
    """Broker connections that one relay process sends over side by side."""
    MAX_ATTEMPTS: int = 7
    """Attempts to dispatch a message that the broker rejects, before it is dead."""
    LINK_KEYS: bool = True
    """Whether a message with a key names its predecessor of that key, for `ordered`
    stages, here or in other services."""
    BREAKER_MAX_PAUSE: float = 30.0
    """Longest pause, in seconds, between probes of a broker that is down."""


@dataclass(frozen=True)
class RedeliverySettings:
    """The redelivery policy of stages that do not set one."""

    MAX_REDELIVERIES: int = 6
    INITIAL_DELAY: float = 1.0
    BACKOFF: float = 2.0
    MAX_DELAY: float = 300.0
    JITTER: float = 0.15
    MODE: Literal["blocking", "non_blocking", "broker"] = "non_blocking"


@dataclass(frozen=True)
class ConsumeSettings:
    """The settings of the consumer, which receives messages and runs stages."""

    PREFETCH: int = 10
    """Unacknowledged messages that the broker may send ahead to one thread."""
    POLL_INTERVAL: float = 0.5
    """Seconds between queries for parked messages that have become due."""
    STUCK_AFTER: float = 60.0
    """Seconds after which a running handler is named, with its stack, in the log."""
    THROTTLE_AFTER: int = 0
    """Failures in a row after which a stage works one message at a time; 0: never."""
    THROTTLE_PAUSE: float = 1.0
    """Seconds between messages of a throttled stage."""
    HEARTBEAT: float = 5.0
    """Seconds between a worker's heartbeats, at most 60. A worker counts as dead when
    its last heartbeat is older than three intervals plus 15 seconds."""
    MAX_MESSAGES: int = 0
    """Deliveries after which `consume` drains and ends; 0: never."""
    MAX_MEMORY: float = 0.0
    """MiB of memory above which `consume` drains and ends; 0: never."""


@dataclass(frozen=True)
class HttpSettings:
    """The settings of the HTTP outbox."""

    USING: str = "default"
    """The database whose transaction a request gets."""
    CONTROL_MESSAGE: Literal["before_commit", "off"] = "before_commit"
    """Whether a request that stored messages sends its own service a control message
    before it commits, so that they leave even if the process dies."""
    CONTROL_MESSAGE_ORACLE: Literal["auto", "delay"] = "auto"
    """How the control message's receiver learns whether the request has committed:
    "auto" queries PostgreSQL, and waits on other databases; "delay" always waits."""
    ON_CONTROL_FAILURE: Literal["commit", "fail"] = "commit"
    """What a request does when its control message cannot be sent: "commit" (if the
    process then dies, the relay sends the messages), or "fail", which rolls back."""
    CONTROL_TIMEOUT: float = 5.0
    """Longest time, in seconds, that a request waits for its control message's receipt,
    connecting included."""
    CONTROL_GROUP: float = 1.0
    """Seconds for which the requests of a process share a control message, on
    PostgreSQL with a broker that is not in that database; 0: one for each request."""
    MAX_COMMIT_DURATION: float = 15.0
    """Longest time, in seconds, from the control message to the commit, if the receiver
    can only wait. After it the request is given up, and its commit fails with
    CommitTimedOut."""
    COMMIT_DELAY_INCREMENT: float = 0.5
    """Seconds before the receiver checks again; doubled each time."""
    ROLLBACK_ON_4XX: bool = False
    """Whether a response of 400 to 499 rolls back, like one of 500 and more."""
    IDEMPOTENCY: bool = False
    """Whether an unsafe request with an Idempotency-Key is executed only once."""
    IDEMPOTENCY_CALLER: str | None = None
    """Dotted path of a function from a request to its caller, as text; if it returns
    None, the key is refused. Needed if neither Django's users and sessions nor an
    Authorization header identify your callers."""


@dataclass(frozen=True)
class RetentionSettings:
    """How many days settled rows are kept. The value None keeps them for ever."""

    OUTBOX: float | None = 7
    INBOX: float | None = 14
    DEAD_LETTERS: float | None = None
    IDEMPOTENCY: float | None = 1
    FLOWS: float | None = 30
    """Runs that have ended, with their steps."""


@dataclass(frozen=True)
class LakeSettings:
    """Where the data pipeline's lake is, and how the pipeline writes and reads it."""

    URI: str
    """A directory, or a place in an object store."""
    STORAGE_OPTIONS: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Options of an object store: addresses, and keys that are not in the
    environment."""
    KEEP_BODIES: bool = True
    """Whether the lake stores the bodies of messages."""
    READER: str | None = None
    """A replica of the outbox's database for jobs that only read: its alias in
    DATABASES or its URL."""


@dataclass(frozen=True)
class FlowSettings:
    """The settings of flows."""

    HISTORY: bool = True
    """Whether each step of a run leaves a row, with the state after it."""
    BATCHES: bool = False
    """Whether `batch()` may be used: its answers have a stage, `SERVICE.batches.steps`.
    Read when Django starts."""


@dataclass(frozen=True)
class PipelineSettings:
    """The rules by which the pipeline's `reconcile` judges messages. In a pattern, *
    stands for any characters."""

    EXTERNAL: tuple[str, ...] = ()
    """Destinations that something consumes which keeps no inbox, or brokers at which
    nothing else is consumed, as "broker:ALIAS"."""
    EXTERNAL_SENDERS: tuple[str, ...] = ()
    """Senders of messages that keep no outbox: other services, or the sources of
    CloudEvents. "" is for messages that name no sender."""
    LATE_AFTER: Mapping[str, float] = field(default_factory=dict)
    """Seconds after which a message is late, by destination; "*" is for all others."""
    STUCK_AFTER: float = 21_600.0
    """Seconds after which a message that has not left, or is not processed, is a
    finding."""
    DATABASES: tuple[str, ...] = ()
    """Further databases of this service, by their aliases: `reconcile` and `analyze`
    read all of them."""


@dataclass(frozen=True)
class AlertSettings:
    """The alerts that a running relay begins and ends. Alerts are stored as rows.
    Signals, log lines, mails and a webhook report them."""

    KINDS: tuple[str, ...] = ()
    """Kinds of alarms, as in `message_status --fail-on`, or "bad" for all but warnings.
    If empty, no alerts are raised."""
    AFTER: float = 60.0
    """Seconds for which an alarm must last before it is raised, or be away before it is
    ended."""
    MAIL: tuple[str, ...] = ()
    """Addresses that get a mail, from DEFAULT_FROM_EMAIL."""
    WEBHOOK_ENV: str = "TXMSG_WEBHOOK_URL"
    """Name of the environment variable with the webhook's URL, if there is one."""


@dataclass(frozen=True)
class CelerySettings:
    """The settings for Celery tasks that are called through the outbox."""

    REQUIRE_ATOMIC: bool = False
    """Whether calling a task outside of a transaction is an error, except in a worker
    and in beat. If `False`, such a task goes to Celery's broker at once."""


@dataclass(frozen=True)
class BrokerSettings:
    """An entry of BROKERS."""

    BACKEND: str = ""
    URL: str = ""


@dataclass(frozen=True)
class RecurringSettings:
    """An entry of SCHEDULE: the arguments of `every()`. EXPIRES is in seconds."""

    EVERY: str
    DESTINATION: str
    BODY: Any
    TZ: str | None
    MISSED: Literal["latest", "all"]
    HEADERS: Mapping[str, object]
    KEY: str | None
    EXPIRES: float | None
    USING: str | None
    BROKER: str
    UNIQUE: str | None
    UNIQUE_UNTIL: Literal["left", "processed"]


@dataclass(frozen=True)
class Settings:
    """All settings under TXMSG."""

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
    """Whether processes on PostgreSQL announce new messages to each other, by NOTIFY.
    False: all poll, as on other databases."""
    LISTEN_DATABASE: str | None = None
    """The alias by which to listen in the outbox's database, if its own alias connects
    through a pooler that does not support LISTEN."""
    MAX_MESSAGE_BYTES: int = 16 * 1024 * 1024
    """Largest body that send_message() takes."""
    TRANSACTION_DEFINITION: str | None = None
    """Dotted path of a function from Stage to TransactionDefinition."""
    STAGE_MIDDLEWARE: tuple[str, ...] = ()
    """Dotted paths of middlewares around the handlers of stages, outermost first."""
    DEAD_LETTER_DESTINATIONS: tuple[str, ...] = ()
    """The broker's own dead-letter queues that `consume` takes in."""
    KNOWN_DESTINATIONS: tuple[str, ...] = ()
    """Destinations of yours that other services consume, as names or patterns like
    "billing.*". If given, the overview warns of messages to any other destination that
    no stage here consumes."""
    EDIT_DEAD_LETTERS: bool = False
    """Whether the admin may redeliver an edited copy."""
    MASK: str | None = None
    """Dotted path of a function that masks personal data before it is shown."""
    TENANT_HEADER: str = ""
    """The header with the tenant of a message, for the admin's page of whom dead
    letters affect; empty: it shows no tenants."""
    ORDER_PATIENCE: float = 900.0
    """Seconds after which a message that waits in an ordered stage for its predecessor
    is shown, and with ordered="skip" no longer waits for a predecessor that has not
    arrived."""
    ORDER_MAX_WAITING: int = 2_000_000
    """Number of messages waiting for their predecessors at which an ordered stage stops
    receiving; 0: no limit."""
    ORDER_MAX_BYTES: int = 2_000_000_000
    """Bytes of those messages, headers included, at which the stage stops receiving; 0:
    no limit."""
    CODECS: tuple[str, ...] = ()
    """Dotted paths of codecs that read and write typed bodies, tried in this order,
    before pydantic."""
    CONTRACT: str | None = None
    """Path of the committed contract; None: asyncapi.json in BASE_DIR."""
    SCHEDULE: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Recurring messages by name, each with the arguments of `every()` in capitals."""
    MISSED_TICKS: Literal["latest", "all"] = "latest"
    """Which of the ticks that passed while no relay ran are caught up: "latest" or "
    ""all"."""
    RELAY: RelaySettings = field(default_factory=RelaySettings)
    REDELIVERY: RedeliverySettings = field(default_factory=RedeliverySettings)
    CONSUME: ConsumeSettings = field(default_factory=ConsumeSettings)
    HTTP: HttpSettings = field(default_factory=HttpSettings)
    CELERY: CelerySettings = field(default_factory=CelerySettings)
    ALERTS: AlertSettings = field(default_factory=AlertSettings)
    VERSION: str = ""
    """The version of your code, for example a commit: *Workers* shows which one each
    process runs."""
    FLOWS: FlowSettings = field(default_factory=FlowSettings)
    REPLY_TO: tuple[str, ...] = ()
    """Destinations that requests may name for their answers, beside the steps of flows
    (`*.steps`) and the answers to views (`*.answers`)."""
    LAKE: LakeSettings | None = None
    """The pipeline's lake: its URI, or a dict of its settings."""
    PIPELINE: PipelineSettings = field(default_factory=PipelineSettings)
    RETENTION: RetentionSettings = field(default_factory=RetentionSettings)

    @property
    def services(self) -> tuple[str, ...]:
        """The current and former names under which this service has stored messages."""
        return (self.SERVICE, *self.FORMER_SERVICES)


@cache
def hints(kind: type) -> dict[str, Any]:
    """Return the keys of a section of the settings, each with its type."""
    return typing.get_type_hints(kind)
