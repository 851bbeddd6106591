"""All exceptions of the package outside `jms`.

TxmsgError
├── ConfigurationError      a setting is wrong; `manage.py check` reports it
├── StoreError              send_message() refused a message; nothing was stored
│   ├── TransactionRequired     no open transaction
│   ├── InvalidMessage          body, header, key, destination, delay or size
│   └── DuplicateMessage        the id is already stored
│       └── AlreadyPending          a pending message has the same unique key
├── DecodeError             an incoming message cannot be read
│   └── NewerCodeNeeded         only newer code can read it; it waits
├── BrokerError             the communication with a broker failed
│   ├── BrokerUnavailable       nothing was sent; try again later
│   ├── DispatchRejected        the broker refused this message for good
│   ├── DestinationUnavailable  the destination accepts no messages at present
│   ├── DeliveryLost            another worker has taken the delivery
│   ├── DispatchHeld            not sent: an earlier message of its key is not stored
│   └── DispatchUnknown         no proof came; the message may have arrived
├── FlowError           a flow cannot do what was requested
│   ├── AlreadyRunning          a run of this key is open
│   └── AlreadyResumed          nothing waits for this token any more
├── SessionError            an outbox session was used before it began, or too late
├── WorkerFailed            a thread of `consume` or `relay` ended by an error
├── TaskGivenUp             a Celery OnceTask killed its worker too often
└── StageError              a stage's transaction could not be completed
    ├── SwallowedDatabaseError  the handler hid an error that spoiled its transaction
    ├── DurableInStage          atomic(durable=True) inside a stage
    ├── BlockLeftOpen           your code began a transaction and did not end it
    ├── MiddlewareMisused       a middleware called the next one wrongly, or not at all
    ├── StageTimedOut           the handler took longer than its timeout
    └── CommitTimedOut          a tombstone forbids this late commit

Refuse and Redeliver are not errors: a handler raises them to decide about its message.
"""

from __future__ import annotations

import uuid

#: Longest delay of anything, in seconds: every database can store its end.
MAX_SECONDS = 100 * 365.25 * 86_400


class TxmsgError(Exception):
    """Base of all errors raised by django_txmsg."""


class ConfigurationError(TxmsgError):
    """A setting or an option is wrong. `manage.py check` lists all errors of the
    settings."""


class StoreError(TxmsgError):
    """The message was not stored. The transaction can go on without it."""


class TransactionRequired(StoreError):
    """`send_message()` was called while no transaction was open."""


class InvalidMessage(StoreError, ValueError):
    """The message cannot be sent, because of its body, a header, its key, destination
    or size."""


class DuplicateMessage(StoreError):
    """A message with this id is already stored in the outbox."""


class AlreadyPending(DuplicateMessage):
    """A pending message, `message_id`, has the same unique key."""

    def __init__(self, detail: str, message_id: uuid.UUID | None = None) -> None:
        super().__init__(detail)
        self.message_id = message_id


class DecodeError(TxmsgError):
    """A received message cannot be read. The message is buried with its original bytes.

    `reason` is a short code, which is stored with the dead letter.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class NewerCodeNeeded(DecodeError):
    """Only newer code can read this version of the body. The message waits for that
    code."""

    def __init__(self, name: str, version: int, here: int) -> None:
        super().__init__(
            "needs_newer_code",
            f"{name} is read by version {version} and above, and this is {here}",
        )
        self.name, self.version = name, version


class BrokerError(TxmsgError):
    """The communication with a broker failed."""


class BrokerUnavailable(BrokerError):
    """The broker cannot be reached; nothing was sent."""


class DispatchRejected(BrokerError):
    """The broker will never take this message: it is too large, or has an invalid
    header. This counts as a failed attempt."""


class DestinationUnavailable(BrokerError):
    """The destination currently accepts no messages: it is full or missing, or the user
    lacks a permission. The error's text is the broker's.

    The destination is paused, and no attempt is counted. The message may not have been
    stored, so it is sent again later.
    """


class DeliveryLost(BrokerError):
    """Another worker has taken or processed the message, because the lease on it ended.
    The broker's transaction was rolled back."""


class DispatchHeld(BrokerError):
    """The message was not sent, because the broker has not stored an earlier message of
    the same key yet."""


class DispatchUnknown(BrokerError):
    """No receipt came, so the broker may or may not have stored the message.

    The message is sent again with the same id, and the receiver's inbox drops the
    duplicate. `written` is False if the message was certainly not sent.

    `hung_up` is True if the broker ended the connection, as some brokers do when they
    refuse a message. The messages of the batch are then sent one by one. If the broker
    hangs up on a single message, that counts as a failed attempt of the message. If
    `hung_up` is False, the broker only did not answer: then the whole broker is paused,
    and no attempt is counted.
    """

    def __init__(
        self, detail: str, *, written: bool = True, hung_up: bool = False
    ) -> None:
        super().__init__(detail)
        self.written = written
        self.hung_up = hung_up


class FlowError(TxmsgError):
    """A flow cannot do what was requested. Nothing was stored."""


class AlreadyRunning(FlowError):
    """A run of this flow with this key is open. Its id is `run_id`."""

    def __init__(self, detail: str, run_id: uuid.UUID) -> None:
        super().__init__(detail)
        self.run_id = run_id


class AlreadyResumed(FlowError):
    """No run waits for this token: the run was resumed before, its deadline has passed,
    or the run has ended."""


class SessionError(TxmsgError):
    """An outbox session was used before its beginning or after its end, or it was begun
    a second time."""


class WorkerFailed(TxmsgError):
    """An error ended a thread of a worker process, so the process ends too, and its
    supervisor must restart it. The messages in progress are delivered again."""


class TaskGivenUp(TxmsgError):
    """A OnceTask has killed its worker at each delivery, or has lost its connection to
    the database, and is not run again.

    This error differs from Celery's WorkerLostError, after which Celery delivers the
    message once more.
    """


class StageError(TxmsgError):
    """A stage's transaction could not be completed, and was rolled back.

    Raised itself if a handler returns a coroutine or a generator, whose code has not
    run, or ends the stage's transaction by a method of the driver's connection.
    """


class SwallowedDatabaseError(StageError):
    """Your code caught a database error inside a stage or a session. Since then, the
    transaction of that stage or session can only roll back. Or a handler called
    `transaction.set_rollback(True)`.

    Without this exception, Django would roll back silently, and the work would be lost,
    although the message is acknowledged or the response is sent. Let the error
    propagate, or put the failing query into an `atomic()` block of its own and catch
    the error *outside* that block.
    """


class DurableInStage(StageError):
    """The handler entered `atomic(durable=True)` inside the stage's transaction. Remove
    durable=True, or use transaction="broker_only" for this stage."""


class BlockLeftOpen(StageError):
    """Your code entered `transaction.atomic()` inside a stage or a session and did not
    leave it. Or a handler switched autocommit off and not on again."""


class MiddlewareMisused(StageError):
    """A middleware of TXMSG["STAGE_MIDDLEWARE"] did not call the next middleware, or
    called it twice, from another thread, or with another message.

    To bury a message instead of processing it, raise Refuse.
    """


class StageTimedOut(StageError):
    """The handler ran longer than `@stage(..., timeout=)` allows."""


class CommitTimedOut(StageError):
    """The session took too long to commit: it was given up, and a tombstone forbids the
    commit."""


class Refuse(Exception):
    """A handler raises this to bury its message immediately, because another attempt is
    pointless."""


class StageStopped(Refuse):
    """An operator stopped the message while its handler was running."""


class Redeliver(Exception):
    """A handler raises this so that it runs again after `after` seconds, whatever the
    policy's back-off is. The attempt counts, so the policy's maximum still applies."""

    def __init__(self, after: float, reason: str = "") -> None:
        # Written so that NaN fails: every comparison with NaN is false.
        if not 0 <= after <= MAX_SECONDS:
            raise ValueError(
                f"Redeliver(after={after!r}): seconds must not be negative, nor more "
                f"than a hundred years"
            )
        super().__init__(reason or f"redelivery requested in {after:g} s")
        self.after = float(after)
