"""The errors of this client, as one hierarchy of exceptions.

In hop 4 of a message, a broker stores the message, refuses the message, or does not
answer. ::

    MessagingError
    ├── IllegalStateError            closed, forked, or called by its own callback
    ├── InvalidDestinationError      no such name can exist on this broker
    ├── MessageFormatError           a header or body that cannot be written or read
    ├── MessageNotAccessibleError    in flight: read it in the completion listener
    ├── UnsupportedOperationError    this broker, session or producer cannot do that
    ├── WindowFullError              not written: no room in the window in time
    ├── ConnectionFailedError        no host of the factory accepted the connection
    ├── RequestRejectedError         the broker answered ERROR
    │   └── SendRejectedError        ... to a SEND: this message is not stored
    ├── SendHeldBackError            an earlier message of its key is not stored
    ├── RequestTimeoutError          no answer to a request that is not a SEND
    ├── SendOutcomeUnknownError      perhaps stored: send the same message id again
    │   ├── SendTimeoutError         no receipt before the deadline
    │   └── ConnectionLostError      the connection ended before the receipt
    ├── TransactionRolledBackError   commit failed: none of its messages is stored
    └── TransactionInDoubtError      commit was written, and its outcome is unknown
"""

from __future__ import annotations


class MessagingError(Exception):
    """Base of every error of this client."""


class IllegalStateError(MessagingError):
    """The object cannot do this now: it is closed, it was copied by a fork, or one of
    its own callbacks makes the call."""


class InvalidDestinationError(MessagingError):
    """The destination is missing, malformed, or impossible on this broker."""


class MessageFormatError(MessagingError):
    """A header or body cannot be written to, or read from, a frame."""


class MessageNotAccessibleError(MessagingError):
    """The message is in flight. It can be used after its completion listener was
    called."""


class UnsupportedOperationError(MessagingError):
    """The operation is not supported by this broker, session or producer."""


class WindowFullError(MessagingError, TimeoutError):
    """The session's window stayed full until the time-out. The message was not
    written."""


class ConnectionFailedError(MessagingError, ConnectionError):
    """None of the factory's hosts accepted the connection."""


class RequestRejectedError(MessagingError):
    """The broker answered a frame with ERROR.

    ``broker_message`` holds the ERROR frame's ``message`` header and the start of its
    body.
    """

    def __init__(self, text: str, *, broker_message: str = "") -> None:
        """Keep the broker's message separately from the error's text."""
        super().__init__(text)
        self.broker_message = broker_message


class SendRejectedError(RequestRejectedError):
    """The broker has refused this message permanently, or this client has refused to
    send it."""


class RequestTimeoutError(MessagingError, TimeoutError):
    """The broker did not answer a request in time. It is unknown whether the request
    took effect."""


class SendOutcomeUnknownError(MessagingError):
    """It is unknown whether the message is stored.

    Send the message again with the same message id. The receiver's inbox drops the
    copy.

    ``written`` is false if the frame certainly never left this process. ``silent`` is
    true if the broker stopped reading or answering, without ending the connection. If
    an ERROR frame ended the connection, ``broker_message`` is its text. The broker has
    then probably refused one of the messages in flight. Send these messages one at a
    time to find the refused message.
    """

    def __init__(
        self,
        text: str,
        *,
        written: bool = True,
        broker_message: str = "",
        silent: bool = False,
    ) -> None:
        """Record whether the frame was written, and the broker's ERROR."""
        super().__init__(text)
        self.written = written
        self.broker_message = broker_message
        self.silent = silent


class SendHeldBackError(MessagingError):
    """The message was not sent, because an earlier message of its key was not
    stored."""


class SendTimeoutError(SendOutcomeUnknownError, TimeoutError):
    """No receipt arrived before the send's deadline."""


class ConnectionLostError(SendOutcomeUnknownError, ConnectionError):
    """The connection ended before the receipt arrived."""

    def unwritten(self, text: str) -> ConnectionLostError:
        """Return an error for a frame that was not written, because the connection had
        already ended with this error."""
        more = self.broker_message
        return ConnectionLostError(
            text, written=False, broker_message=more, silent=self.silent
        )


class TransactionRolledBackError(MessagingError):
    """The transaction is aborted. Its messages are not sent, and its received messages
    are not acknowledged."""


class TransactionInDoubtError(MessagingError):
    """COMMIT was written, and its outcome is unknown. ActiveMQ has committed either the
    whole transaction or nothing. RabbitMQ may have committed a part of it."""
