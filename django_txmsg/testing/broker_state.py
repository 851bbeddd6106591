"""The state that all connections of the scripted broker share: script, store, loop and
settings.

The store has the queues, subscriptions and messages, in memory. A queue keeps the order
of its messages. The prefetch of a subscription limits its unacknowledged messages. If
the subscription ends, its unacknowledged messages return to their old places in the
queue, marked as redelivered. A topic consists of the queues of its subscriptions.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from .frames import Frame
from .profiles import Profile
from .script import Script

_numbers = itertools.count(1)


@dataclass(slots=True, eq=False)
class StoredMessage:
    """A message at the broker. ``number`` grows with each message that the broker
    stores."""

    destination: str
    headers: dict[str, str]
    body: bytes
    redelivered: bool = False
    #: How often it was delivered.
    deliveries: int = 0
    #: Epoch seconds after which it is not delivered any more.
    expires_at: float | None = None
    number: int = field(default_factory=lambda: next(_numbers))

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode()


@dataclass(eq=False)
class Subscription:
    """The subscription of one client, with the deliveries that the client has not
    acknowledged. ``prefetch`` limits these; None means no limit. ``deliver`` writes the
    MESSAGE frame."""

    name: str
    queue: Queue
    prefetch: int | None
    deliver: Callable[[Subscription, str, StoredMessage], None]
    in_bytes: bool
    pending: dict[str, StoredMessage] = field(default_factory=dict)

    def has_room(self) -> bool:
        """Return whether the prefetch allows another delivery."""
        if self.prefetch is None:
            return True
        pending = self.pending.values()
        used = sum(len(m.body) for m in pending) if self.in_bytes else len(pending)
        return used < self.prefetch

    def give(self, message: StoredMessage) -> None:
        """Deliver one message, which the client must acknowledge."""
        ack_id = f"{self.name}:{next(_numbers)}"
        message.deliveries += 1
        self.pending[ack_id] = message
        self.deliver(self, ack_id, message)

    def start(self) -> None:
        """Start to receive messages from the queue."""
        self.queue.subscriptions.append(self)
        self.queue.dispatch()

    def stop(self) -> None:
        """Stop receiving messages. Unacknowledged messages stay with this
        subscription."""
        if self in self.queue.subscriptions:
            self.queue.subscriptions.remove(self)

    def give_back(self) -> None:
        """Put this subscription's unacknowledged messages back into the queue."""
        unacknowledged = list(self.pending.values())
        self.pending.clear()
        self.queue.put_back(unacknowledged)

    def settle(self, ack_id: str) -> None:
        """Remove an acknowledged message, and deliver further messages."""
        del self.pending[ack_id]
        self.queue.dispatch()


class Queue:
    """A queue: messages in order, and the subscriptions that receive them."""

    def __init__(self) -> None:
        """Create an empty queue."""
        self.messages: deque[StoredMessage] = deque()
        self.subscriptions: deque[Subscription] = deque()

    def put(self, message: StoredMessage) -> None:
        """Append a message, and deliver messages to subscriptions whose prefetch allows
        it."""
        self.messages.append(message)
        self.dispatch()

    def put_back(self, messages: list[StoredMessage]) -> None:
        """Put unacknowledged messages back at their old places, marked as
        redelivered."""
        for message in messages:
            message.redelivered = True
        ordered = sorted([*messages, *self.messages], key=lambda m: m.number)
        self.messages = deque(ordered)
        self.dispatch()

    def dispatch(self) -> None:
        """Deliver messages in turn to the subscriptions whose prefetch allows it."""
        while self.messages:
            taker = next((s for s in self.subscriptions if s.has_room()), None)
            if taker is None:
                return
            self.subscriptions.remove(taker)
            self.subscriptions.append(taker)
            message = self.messages.popleft()
            if message.expires_at is None or message.expires_at > time.time():
                taker.give(message)


class Store:
    """All queues and topics of the broker, by destination."""

    def __init__(self) -> None:
        """Start empty."""
        self.queues: dict[str, Queue] = {}
        self._topics: dict[str, dict[str, Queue]] = {}

    def queue(self, destination: str) -> Queue:
        """Return the queue with this name. Create it on first use."""
        return self.queues.setdefault(destination, Queue())

    def topic_queue(self, topic: str, subscription: str) -> Queue:
        """Return the queue that holds a subscription's copies of a topic's messages."""
        return self._topics.setdefault(topic, {}).setdefault(subscription, Queue())

    def forget(self, topic: str, subscription: str) -> None:
        """Delete a subscription of a topic, with its waiting messages."""
        self._topics.get(topic, {}).pop(subscription, None)

    def publish(self, message: StoredMessage) -> None:
        """Copy a message to every subscription of the topic."""
        for queue in list(self._topics.get(message.destination, {}).values()):
            copy = StoredMessage(
                message.destination, message.headers, message.body,
                expires_at=message.expires_at,
            )  # fmt: skip
            queue.put(copy)

    def lose_volatile(self) -> None:
        """Drop all messages that are not persistent."""
        topics = [queue for topic in self._topics.values() for queue in topic.values()]
        for queue in [*self.queues.values(), *topics]:
            queue.messages = deque(
                one for one in queue.messages if one.headers.get("persistent") == "true"
            )


@dataclass(frozen=True, slots=True)
class ReceivedFrame(Frame):
    """A received frame, with the number of its connection and the monotonic time of its
    arrival."""

    connection: int = 0
    at: float = field(default_factory=time.monotonic)


# The scripted broker's only thread, which runs an event loop of asyncio.
#
# The thread holds the broker's lock while it handles a frame or a timer. Every public
# method of the broker takes this lock, so a test never sees a frame that is only partly
# handled. Only this thread uses the transports.


class Loop:
    """An event loop in a separate thread."""

    def __init__(
        self, lock: threading.Condition, on_error: Callable[[Exception], None]
    ) -> None:
        """Start a loop that uses the broker's lock. If a function of the test raises an
        exception, the loop calls ``on_error`` and continues."""
        self._lock = lock
        self._on_error = on_error
        #: The transports that are open.
        self.transports: set[asyncio.Transport] = set()
        # Whatever policy is set: other threads take sockets from this kind of loop.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="scripted-broker", daemon=True
        )
        self._thread.start()

    def serve(
        self,
        sock: socket.socket,
        connected: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> Future[asyncio.Server]:
        """Accept connections from a listening socket. ``connected`` creates the
        protocol of a connection."""
        serving = self._loop.create_server(connected, sock=sock, ssl=tls)
        return asyncio.run_coroutine_threadsafe(serving, self._loop)

    def close(self, server: Future[asyncio.Server]) -> None:
        """Close a listening socket, and return when it is closed. The caller must not
        hold the lock."""
        listening = server.result()

        async def close() -> None:
            listening.close()

        if threading.current_thread() is self._thread:
            listening.close()
        elif not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(close(), self._loop).result()

    def call(self, action: Callable[[], None], delay: float = 0.0) -> None:
        """Run the action on the loop's thread, after a delay in seconds."""
        self._loop.call_soon_threadsafe(
            self._loop.call_later, delay, self.attempt, action
        )

    def attempt(self, action: Callable[[], None]) -> None:
        """Run the action with the lock held. Call this on the loop's thread."""
        with self._lock:
            try:
                action()
            except Exception as error:
                self._on_error(error)

    def stop(self) -> None:
        """Close every connection and end the thread. The caller must not hold the
        lock."""

        def end() -> None:
            for transport in self.transports:
                transport.abort()
            self._loop.call_soon(self._loop.stop)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(end)
            self._thread.join(10)
            self._loop.close()


class BrokerState:
    """The state of the scripted broker, without sockets. Use it only with the lock
    held. It records every received frame, and lets a test wait for frames with a
    deadline."""

    # The arguments of ``ScriptedBroker``.
    profile: Profile
    users: Mapping[str, str] | None
    heart_beat: tuple[int, int] | None
    tls: ssl.SSLContext | None

    def __init__(self) -> None:
        """Start the loop, without connections."""
        #: Held while a frame is handled; every wait is on it.
        self.changed = threading.Condition(threading.RLock())
        #: Every frame received, in order, over all connections.
        self.frames: list[ReceivedFrame] = []
        #: Violations of STOMP by clients; empty for a correct client.
        self.violations: list[str] = []
        #: Exceptions in the broker's thread: those of the test's own functions, in
        #: rules.
        self.errors: list[Exception] = []
        self.loop = Loop(self.changed, self.failed)
        self.script = Script()
        self.store = Store()
        #: The most bytes of one write, and the seconds until the next one.
        self.piece: int | None = None
        self.pause = 0.0
        self.silent = False
        self.listening = False
        #: The connections that are open, in the order they were made.
        self.peers: list[Any] = []
        #: How many connections were accepted so far.
        self.accepted = 0

    def accept(self, peer: Any) -> None:
        """Count a connection that a client has made."""
        if not self.listening:
            peer.end("the broker has stopped meanwhile")
            return
        self.accepted += 1
        peer.number = self.accepted
        self.peers.append(peer)
        self.changed.notify_all()

    def forget(self, peer: Any) -> None:
        """Remove a connection that has ended."""
        if peer in self.peers:
            self.peers.remove(peer)
        self.changed.notify_all()

    def is_topic(self, headers: Mapping[str, str]) -> bool:
        """Return True if the imitated broker would treat the destination in these
        headers as a topic."""
        if not self.profile.routes_by_header:
            return headers.get("destination", "").startswith("/topic/")
        routing = headers.get("destination-type", headers.get("subscription-type"))
        return routing != "ANYCAST"

    def store_message(self, message: StoredMessage) -> None:
        """Store a message in its queue, or in the queues of its topic's
        subscriptions."""
        if self.is_topic({**message.headers, "destination": message.destination}):
            self.store.publish(message)
        else:
            self.store.queue(message.destination).put(message)

    def failed(self, error: Exception) -> None:
        """Store an exception that a test's function raised in the broker's thread, and
        wake the waiting test. The caller holds the lock."""
        self.errors.append(error)
        self.changed.notify_all()

    def check(self) -> None:
        """If a function of the test has raised an exception in the broker's thread,
        raise this exception in the caller's thread. Each call raises the oldest
        exception that no earlier call has raised."""
        with self.changed:
            if self.errors:
                raise self.errors.pop(0)

    def received(
        self,
        command: str = "SEND",
        *,
        destination: str | None = None,
        where: Callable[[ReceivedFrame], bool] | None = None,
    ) -> list[ReceivedFrame]:
        """Return the frames with this command that have arrived so far. The command "*"
        matches every frame."""
        with self.changed:
            return [
                frame for frame in self.frames
                if command in (frame.command, "*")
                and (destination is None or frame.destination == destination)
                and (where is None or where(frame))
            ]  # fmt: skip

    def wait_for(
        self,
        command: str = "SEND",
        count: int = 1,
        *,
        timeout: float = 30.0,
        destination: str | None = None,
        where: Callable[[ReceivedFrame], bool] | None = None,
    ) -> list[ReceivedFrame]:
        """Wait until `count` matching frames have arrived, and return all matching
        frames.

        Raises ``AssertionError`` after the timeout, with the number of matching frames
        so far.
        """

        def found() -> list[ReceivedFrame]:
            return self.received(command, destination=destination, where=where)

        self.wait_until(
            lambda: len(found()) >= count, timeout, f"{count} {command} frames"
        )
        return found()

    def wait_until(
        self, condition: Callable[[], bool], timeout: float = 30.0, what: str = ""
    ) -> None:
        """Wait until a condition on the broker is true. The condition is checked after
        every event.

        After the timeout, raises ``AssertionError`` with a description of the events.
        If a function of the test has failed in the broker's thread, raises that
        function's exception.
        """
        deadline = time.monotonic() + timeout
        with self.changed:
            while True:
                self.check()
                if condition():
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError(
                        f"After {timeout:g} s still no {what or condition}. "
                        f"{self.describe()}"
                    )
                # Heartbeats and timers notify no waiter, so check again periodically.
                self.changed.wait(min(left, 0.05))

    def describe(self) -> str:
        """Return a description of all events so far, for the text of an
        ``AssertionError``."""
        counts = Counter(frame.command for frame in self.frames)
        frames = ", ".join(f"{n} {command}" for command, n in counts.items())
        return (
            f"Received: {frames or 'nothing'}; violations: {self.violations or 'none'}."
        )

    def record(self, connection: int, frame: Frame) -> None:
        """Record a received frame. The caller holds the lock."""
        self.frames.append(
            ReceivedFrame(frame.command, frame.headers, frame.body, connection)
        )
        self.changed.notify_all()
