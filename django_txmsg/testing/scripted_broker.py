"""A STOMP broker in the test's own process, controlled by the test.

The broker listens on a real socket, so the test uses the real client over a real
connection. Without a script, the broker behaves like the broker of its profile. A
script can hold back, reorder, drop and repeat receipts, refuse frames, stop reading,
split writes and end connections. The broker records every received frame. Every
``wait_…`` method has a deadline.

    with ScriptedBroker(RABBITMQ) as broker:
        broker.on("SEND", nth=3).cut()
        ...                                     # the client, at broker.url
        broker.wait_for("SEND", 3)
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from .broker_state import BrokerState, StoredMessage
from .conversation import Conversation
from .frames import Frame
from .peer import Peer
from .profiles import CLASSIC, PROFILES, Profile
from .script import Rule


class ScriptedBroker(BrokerState):
    """A scripted STOMP broker. Use it as a context manager."""

    def __init__(
        self,
        profile: Profile | str = CLASSIC,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        users: Mapping[str, str] | None = None,
        heart_beat: tuple[int, int] | None = None,
        tls: ssl.SSLContext | None = None,
        receive_buffer: int | None = None,
        strict: bool = True,
    ) -> None:
        """Start to listen immediately. ``port`` 0 means any free port.

        ``users``: passwords by user name; None accepts all users. ``heart_beat``: the
        two intervals that the broker offers and requests, in milliseconds; None means
        the client's intervals. ``receive_buffer``: the number of bytes that the sockets
        accept while the broker is stalled. ``strict``: the end of the ``with`` block
        raises an error if a client has violated STOMP.
        """
        super().__init__()
        self.profile = PROFILES[profile] if isinstance(profile, str) else profile
        self.users, self.heart_beat, self.tls = users, heart_beat, tls
        self._strict = strict
        self._host, self._receive_buffer = host, receive_buffer
        self._listen(port)

    def _listen(self, port: int) -> None:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.create_server((self._host, port), family=family, backlog=128)
        if self._receive_buffer is not None:  # what is accepted inherits it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer)
        self.port: int = sock.getsockname()[1]
        self.listening = True
        self._server = self.loop.serve(sock, partial(Conversation, self), self.tls)

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port on which the broker listens."""
        return self._host, self.port

    @property
    def url(self) -> str:
        """The broker's URL for a ``ConnectionFactory`` or ``TXMSG["BROKERS"]``."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"stomp{'+ssl' if self.tls else ''}://{host}:{self.port}"

    # -- the script ---------------------------------------------------------------

    def on(
        self,
        command: str = "SEND",
        *,
        nth: int | None = None,
        times: int | None = None,
        destination: str | None = None,
        where: Callable[[Frame], bool] | None = None,
    ) -> Rule:
        """Create a rule that selects frames, and return the rule. Then call one of the
        rule's verbs. The command "*" selects every command.

        ``nth``: select only the n-th matching frame, counted from 1. The count starts
        when the rule is created, and includes frames that another rule decides about.
        ``times``: the maximum number of frames that this rule decides about. Older
        rules come first.
        """
        rule = Rule(command, nth=nth, times=times, destination=destination, where=where)
        with self.changed:
            self.script.rules.append(rule)
        return rule

    def forget_rules(self) -> None:
        """Remove all rules. Held frames stay held."""
        with self.changed:
            self.script.rules.clear()

    def release(self, count: int | None = None, *, order: Sequence[int] = ()) -> int:
        """Release the first ``count`` held frames (default: all). Return the number of
        released frames.

        ``order``: instead, the indices of the held frames to release, in this order.
        """
        with self.changed:
            released = self.script.release(count, order)
            self.changed.notify_all()
            return released

    def stall(self) -> None:
        """Stop reading from the open connections, like RabbitMQ during an alarm."""
        with self.changed:
            for peer in self.peers:
                peer.stall()

    def resume(self) -> None:
        """Read again after a stall, including a stall by a rule."""
        with self.changed:
            for peer in list(self.peers):
                peer.resume()
            self.changed.notify_all()

    def split_writes(self, *, every: int, pause: float = 0.002) -> None:
        """Split written bytes into pieces of ``every`` bytes, with a pause after
        each."""
        with self.changed:
            self.piece, self.pause = every, pause

    def silence_heartbeats(self) -> None:
        """Stop sending heartbeats, but continue to send frames."""
        with self.changed:
            self.silent = True

    def write(self, data: bytes) -> None:
        """Write raw bytes, which need not be a frame, to every connection."""
        with self.changed:
            for peer in self.peers:
                peer.write(data)

    def cut(self, *, reset: bool = False) -> None:
        """End every connection. With ``reset``, send RST instead of FIN."""
        with self.changed:
            for peer in list(self.peers):
                peer.cut(reset=reset)

    def stop(self) -> None:
        """End every connection and refuse new connections."""
        with self.changed:
            self.listening = False
        self.loop.close(self._server)
        self.cut()

    def restart(self) -> None:
        """End every connection, drop the messages that are not persistent, and listen
        again on the same port."""
        self.stop()
        with self.changed:
            self.store.lose_volatile()
            self._listen(self.port)

    # -- inspection ---------------------------------------------------------------

    def wait_for_held(self, count: int = 1, *, timeout: float = 30.0) -> list[Frame]:
        """Wait until at least `count` frames are held, and return all held frames."""
        self.wait_until(
            lambda: len(self.script.held) >= count, timeout, f"{count} held frames"
        )
        with self.changed:
            return [held.frame for held in self.script.held]

    def wait_for_connections(self, count: int, *, timeout: float = 30.0) -> list[Peer]:
        """Wait until exactly `count` connections are open, and return these
        connections."""
        self.wait_until(
            lambda: len(self.peers) == count, timeout, f"{count} open connections"
        )
        return list(self.peers)

    def stored(self, destination: str) -> list[StoredMessage]:
        """Return the messages that wait in a queue. Delivered messages are not
        included."""
        with self.changed:
            return list(self.store.queue(destination).messages)

    def put(
        self,
        destination: str,
        body: bytes | str,
        headers: Mapping[str, str] | None = None,
    ) -> StoredMessage:
        """Store and deliver a message, like the SEND of another client."""
        data = body.encode() if isinstance(body, str) else body
        message = StoredMessage(
            destination, {"persistent": "true", **(headers or {})}, data
        )
        with self.changed:
            self.store_message(message)
            self.changed.notify_all()
        return message

    def close(self) -> None:
        """Stop the broker permanently, and free the port.

        A rule may have called a function of the test. If that function has raised an
        exception, this method raises the same exception.
        """
        self.stop()
        self.loop.stop()
        self.check()

    def __enter__(self) -> ScriptedBroker:
        """Return the broker, which is already listening."""
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Stop the broker. Raises ``AssertionError`` if a client has violated STOMP."""
        try:
            self.close()
        except Exception:
            if error is None:  # it would hide what the test itself has raised
                raise
        if self._strict and error is None and self.violations:
            raise AssertionError(f"Clients broke STOMP's rules. {self.describe()}")
