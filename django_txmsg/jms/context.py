"""A connection and one session as one object, with producers in a fluent style.

Hop 4 of a message, in Jakarta Messaging's simplified API: ::

    context.create_producer().set_async(listener).set_priority(4).send("orders", "text")
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from . import completion, restrictions
from .closing import Closing
from .completion import CompletionFuture, CompletionListener
from .connection import Connection
from .consumer import AckMode, MessageConsumer
from .destination import Destination
from .message import DeliveryMode, Message


class ContextProducer:
    """A producer, created by ``context.create_producer``. Every setter returns the
    producer."""

    def __init__(self, context: Context) -> None:
        """Begin with the default delivery options, and with synchronous sends."""
        self._context = context
        self._producer = context.session.create_producer()
        self._listener: CompletionListener | None = None
        self._given: CompletionListener | tuple[object, object] | None = None

    def set_async(
        self, listener: CompletionListener | tuple[object, object] | None
    ) -> ContextProducer:
        """Set the listener of later sends; ``None`` makes them synchronous again."""
        if listener is None:
            self._listener = self._given = None
        else:
            options = self._context.session.link.options
            restrictions.check(options.in_atomic, options.on_event_loop)
            self._listener, self._given = completion.as_listener(listener), listener
        return self

    def get_async(self) -> CompletionListener | tuple[object, object] | None:
        """Return the listener as it was given; ``None`` while sends are synchronous."""
        return self._given

    def set_delivery_mode(self, mode: DeliveryMode) -> ContextProducer:
        """Set whether the broker keeps messages through its restart."""
        return self._deliver(mode=mode)

    def set_priority(self, priority: int) -> ContextProducer:
        """Set the priority, 0 to 9."""
        return self._deliver(priority=priority)

    def set_time_to_live(self, time_to_live: timedelta) -> ContextProducer:
        """Set how long the broker keeps a message; ``None`` means without an end."""
        return self._deliver(time_to_live=time_to_live)

    def set_delivery_delay(self, delay: timedelta) -> ContextProducer:
        """Set how long the broker holds a message back."""
        return self._deliver(delay=delay)

    def _deliver(self, **chosen: Any) -> ContextProducer:
        self._producer.delivery = replace(self._producer.delivery, **chosen)
        return self

    def set_property(self, name: str, value: str) -> ContextProducer:
        """Add a header to every later message that does not have it."""
        self._producer.properties[name] = value
        return self

    def send(
        self, destination: str | Destination, body: Any, *, timeout: float | None = None
    ) -> ContextProducer:
        """Send a body or a ``Message``, asynchronously if there is a listener."""
        message = _message(body)
        if self._listener is None:
            self._producer.send(message, destination=destination, timeout=timeout)
        else:
            self._producer.send_async(
                message, self._listener, destination=destination, timeout=timeout
            )
        return self

    def submit(
        self, destination: str | Destination, body: Any, *, timeout: float | None = None
    ) -> CompletionFuture:
        """Send a body or a ``Message`` and return a future of its outcome."""
        return self._producer.submit(
            _message(body), destination=destination, timeout=timeout
        )


class Context(Closing):
    """A context, created by ``factory.create_context``. It owns its connection."""

    def __init__(
        self, connection: Connection, *, transacted: bool, ack_mode: AckMode
    ) -> None:
        """Open the one session."""
        self.connection = connection
        self.session = connection.create_session(transacted, ack_mode)

    def create_producer(self) -> ContextProducer:
        """Create a producer that is not bound to a destination."""
        return ContextProducer(self)

    def create_consumer(
        self, destination: str | Destination, **options: Any
    ) -> MessageConsumer:
        """Subscribe. The options are those of ``session.create_consumer``."""
        return self.session.create_consumer(destination, **options)

    def acknowledge(self, message: Message) -> None:
        """Acknowledge this message and no other."""
        self.session.acknowledge(message)

    def commit(self) -> None:
        """Commit the session's transaction."""
        self.session.commit()

    def rollback(self) -> None:
        """Roll the session's transaction back."""
        self.session.rollback()

    def recover(self) -> None:
        """Receive unacknowledged messages again."""
        self.session.recover()

    def start(self) -> None:
        """Let consumers receive again."""
        self.connection.start()

    def stop(self) -> None:
        """Pause all consumers."""
        self.connection.stop()

    def close(self) -> None:
        """Let outstanding sends complete, then close session and connection."""
        self.connection.close()


def _message(body: Any) -> Message:
    return body if isinstance(body, Message) else Message(body)
