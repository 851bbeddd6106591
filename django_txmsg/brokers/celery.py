"""Hop 4 for Celery: sends task messages to the broker of a Celery app.

The URL `celery://module:app` names the app. kombu sends the messages. Celery's workers
receive them. Stages cannot receive them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from celery import Celery
from kombu import Producer
from kombu.exceptions import OperationalError, SerializerNotInstalled
from kombu.serialization import prepare_accept_content, registry
from kombu.utils.imports import symbol_by_name

from .. import wire
from ..envelope.broker_url import split_url
from ..errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    DestinationUnavailable,
    DispatchRejected,
    DispatchUnknown,
)
from . import refusals
from .base import Broker, Outgoing, Session, faults
from .celery_publication import HEADER, Publication

# Hop 4 for Celery: one session with the broker of an app, through kombu.
#
# AMQP servers confirm a batch in one round trip; others, such as Redis, answer each
# message.

#: Seconds for a batch's confirms, and for a write to finish.
TIMEOUT = 30.0
#: redis-py's errors for a server that is full, or a replica, or whose cluster is down.
_FULL = frozenset(
    {"OutOfMemoryError", "ReadOnlyError", "NoPermissionError", "ClusterDownError"}
    | {"MasterDownError", "TryAgainError"}
)
#: How Redis's other errors for this begin. It has too few replicas, or runs a script.
_REFUSES = ("MISCONF", "OOM", "NOREPLICAS", "BUSY ")


class CelerySession(Session):
    """A session that sends over one kombu connection with one channel."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._outcomes: list[BrokerError | None] = []
        #: By delivery tag, the position in the batch of an unconfirmed message.
        self._open: dict[int, int | None] = {}
        #: By the id it travels under, the position in its batch.
        self._named: dict[str, int] = {}
        self._use_another_channel()

    def _use_another_channel(self) -> None:
        self._channel = channel = self._connection.channel()
        self._producer = Producer(channel, auto_declare=False)
        self._tag = 0
        #: Whether the server confirms messages; others answer each send.
        self._confirms = hasattr(channel, "confirm_select")
        if self._confirms:
            channel.confirm_select()
            channel.events["basic_ack"].add(partial(self._settle, ""))
            channel.events["basic_nack"].add(partial(self._settle, refusals.NACK))
            channel.events["basic_return"].add(self._on_return)
        self._ends = ends(self._connection, channels=self._confirms)

    def send(
        self,
        batch: Sequence[Outgoing],
        *,
        isolate: bool = False,
        timeout: float | None = None,
    ) -> list[BrokerError | None]:
        seconds = TIMEOUT if timeout is None else timeout
        if not isolate:
            return self._send(batch, seconds)
        outcomes: list[BrokerError | None] = []
        for number, one in enumerate(batch):
            outcomes += self._send([one], seconds)
            if isinstance(outcomes[-1], DispatchUnknown):
                outcomes += [_unsent(outcomes[-1])] * (len(batch) - number - 1)
                break
        return outcomes

    def _send(
        self, batch: Sequence[Outgoing], timeout: float
    ) -> list[BrokerError | None]:
        outcomes: list[BrokerError | None] = [None] * len(batch)
        self._outcomes = outcomes
        self._open.clear()
        self._named.clear()
        if not self._confirms:
            # A Redis that has lost its data has lost the bindings too. kombu would not
            # declare them again, and messages to an exchange would reach no queue.
            self._connection.declared_entities.clear()
            self._channel.state.clear()
        ended: DispatchUnknown | None = None
        number, written = 0, False
        try:
            for number, one in enumerate(batch):
                written = False
                try:
                    publication = self._declared(one)
                    written = True
                    self._publish(publication, number, one, timeout)
                except self._ends:
                    raise
                except BrokerError as error:
                    outcomes[number] = error
                except Exception as error:
                    # It cannot be encoded in AMQP, say, or Redis refuses it.
                    ended = _full(error)
                    if ended is not None:
                        written = False
                        break
                    refusal = f"{type(error).__name__}: {error}"
                    outcomes[number] = DispatchRejected(refusal)
            else:
                number = len(batch)
                ended = self._await_confirms(timeout)
        except self._ends as error:
            refused = self._refusal(error, str(error))
            if refused is not None and len(batch) == 1:
                with contextlib.suppress(*self._ends):  # the next send finds out
                    self._use_another_channel()
                return [refused]
            ended = DispatchUnknown(
                f"{type(error).__name__}: {error}",
                # redis-py's TimeoutError is not Python's.
                hung_up=type(error).__name__ != "TimeoutError",
            )
        if ended is not None:
            unproved = set(self._open.values()) if self._confirms else {number}
            for place in range(len(batch)):
                if outcomes[place] is not None:
                    continue
                if place in unproved and (place < number or written):
                    outcomes[place] = ended
                elif place >= number:
                    outcomes[place] = _unsent(ended)
        return outcomes

    def _declared(self, outgoing: Outgoing) -> Publication:
        """Declare a message's queue, and return the message's publication. Raises
        BrokerError if the message cannot be published. Also raises the errors of
        kombu's transport."""
        publication = _publication(outgoing)
        for entity in publication.entities():
            try:
                self._producer.maybe_declare(entity)
            except self._connection.channel_errors as error:
                # With open messages the channel is closed, and their confirms are lost.
                if self._open or _full(error):
                    raise
                self._use_another_channel()
                text = (
                    f"{type(entity).__name__.lower()} {entity.name!r} cannot be "
                    f"declared: {error}"
                )
                raise self._refusal(error, text) or DispatchRejected(text) from error
        return publication

    def _refusal(self, error: Any, text: str) -> BrokerError | None:
        """Return the outcome of a message because of which an AMQP server has closed
        the channel. Return None for other errors."""
        if self._confirms and isinstance(error, self._connection.channel_errors):
            return refusals.by_amqp(error.reply_code, text)
        return None

    def _publish(
        self, publication: Publication, number: int, outgoing: Outgoing, timeout: float
    ) -> None:
        if not self._confirms:
            publication.publish(self._producer)
        else:
            name = publication.properties.setdefault(
                "message_id", outgoing.headers.get(wire.MESSAGE_ID, "")
            )
            self._named[name] = self._open[self._tag + 1] = number
            try:
                # Mandatory: if a queue was deleted, no message is lost silently.
                publication.publish(
                    self._producer,
                    mandatory=publication.has_a_queue,
                    timeout=timeout,
                )
            except self._ends:
                raise
            except Exception:
                del self._open[self._tag + 1]
                raise
            self._tag += 1
        for more in publication.then:
            for entity in more.entities():
                self._producer.maybe_declare(entity)
            more.publish(self._producer)
            if self._confirms:
                self._tag += 1
                self._open[self._tag] = None

    def _await_confirms(self, timeout: float) -> DispatchUnknown | None:
        end = time.monotonic() + timeout
        while self._open:
            left = end - time.monotonic()
            if left <= 0:
                return DispatchUnknown(f"no confirm within {timeout:g} s")
            with contextlib.suppress(TimeoutError):
                self._connection.drain_events(timeout=left)
        return None

    def _settle(self, refusal: str, tag: int, multiple: bool) -> None:
        for one in [one for one in self._open if one <= tag] if multiple else [tag]:
            number = self._open.pop(one, None)
            if number is not None and refusal:
                self._outcomes[number] = DestinationUnavailable(refusal)

    def _on_return(
        self, error: Exception, exchange: str, routing_key: str, message: Any
    ) -> None:
        # A return arrives before its confirm.
        number = self._named.get(message.properties.get("message_id", ""))
        if number is not None:
            self._connection.declared_entities.clear()
            self._outcomes[number] = DestinationUnavailable(
                f"no queue of exchange {exchange!r} takes {routing_key!r} any more: "
                f"{error}"
            )

    def _send_only(self, *_: Any, **__: Any) -> NoReturn:
        send_only()

    subscribe = receive = ack = enlist = commit = rollback = _send_only

    def ping(self) -> None:
        try:
            self._connection.channel().close()
        except self._ends as error:
            raise BrokerUnavailable(str(error)) from error

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._connection.release()


def _publication(outgoing: Outgoing) -> Publication:
    headers = outgoing.headers
    try:
        found = Publication.read(
            headers[HEADER], outgoing.body, headers[wire.CONTENT_TYPE]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DispatchRejected(
            f"it is not the message of a Celery task ({type(error).__name__}: "
            f"{error}): call the task, and send other messages to another broker"
        ) from error
    if wire.TRACEPARENT in headers:
        found.headers.setdefault(wire.TRACEPARENT, headers[wire.TRACEPARENT])
    return found


def ends(connection: Any, *, channels: bool) -> tuple[type[BaseException], ...]:
    """Return the exception classes that a broken connection raises. With `channels`,
    include the classes that a broken channel raises."""
    more = connection.channel_errors if channels else ()
    return (*connection.connection_errors, *more, OSError)


def _full(error: Exception) -> DispatchUnknown | None:
    """Return a DispatchUnknown if the error means that Redis accepts no messages to any
    queue. Otherwise return None."""
    text = f"{type(error).__name__}: {error}"
    # The error of a pipeline names the command first.
    code = str(error).rpartition("caused error: ")[2]
    if type(error).__name__ in _FULL or code.startswith(_REFUSES):
        return DispatchUnknown(text, written=False)
    return None


def _unsent(error: BrokerError | None) -> DispatchUnknown:
    hung_up = isinstance(error, DispatchUnknown) and error.hung_up
    return DispatchUnknown(str(error), written=False, hung_up=hung_up)


def send_only() -> NoReturn:
    raise BrokerError(
        "a celery:// broker only sends: Celery's workers receive its messages"
    )


def refused_serializers(app: Any) -> list[str]:
    """Return the serializers of the app's tasks whose messages its workers drop. Raises
    ConfigurationError if accept_content has an unknown name."""
    try:
        accepted = prepare_accept_content(app.conf.accept_content)
    except SerializerNotInstalled as error:
        raise ConfigurationError(
            f"accept_content has a name that this process does not know: {error}."
        ) from error
    names = {app.conf.task_serializer, *(one.serializer for one in app.tasks.values())}
    kinds = {name: registry.name_to_type.get(name) for name in names if name}
    return sorted(
        name
        for name, kind in kinds.items()
        if accepted and kind and kind not in accepted
    )


def open_session(app: Any) -> CelerySession:
    """Connect to the broker of a Celery app, and return a session. Raises
    BrokerUnavailable."""
    # This package requests confirms itself, for a whole batch. It reads nothing between
    # sends, so the server must not wait for heartbeats.
    try:
        connection = app.connection_for_write(
            heartbeat=0, transport_options={"confirm_publish": False}
        )
        driver = connection.transport.driver_type
    except (ImportError, KeyError) as error:
        # Its client library is not installed, or the transport is unknown.
        raise BrokerUnavailable(
            f"the transport of broker_url cannot be used: {error}"
        ) from error
    if driver == "redis":
        # By default kombu waits for Redis without limit.
        for option in ("socket_timeout", "socket_connect_timeout"):
            connection.transport_options.setdefault(option, TIMEOUT)
    try:
        connection.ensure_connection(
            max_retries=1, interval_start=0, interval_step=0, timeout=TIMEOUT
        )
        return CelerySession(connection)
    except (OperationalError, *ends(connection, channels=True)) as error:
        with contextlib.suppress(Exception):
            connection.release()
        raise BrokerUnavailable(f"{connection.as_uri()}: {error}") from error


class CeleryBroker(Broker):
    """The broker of a Celery app. Sends only task messages."""

    consumable = False
    pauses_destinations = False
    kind = "celery"

    @property
    def app(self) -> Any:
        """The app that the URL names. Raises ConfigurationError if the app cannot be
        imported."""
        path = split_url(self._url).netloc
        module, _, name = path.partition(":")
        try:
            app = symbol_by_name(f"{module}:{name or 'app'}")
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigurationError(
                f"{path!r} names no Celery app, as in celery://shop.celery:app: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(app, Celery):
            kind = type(app).__name__
            raise ConfigurationError(f"{path!r} is {kind}, not a Celery app.")
        return app

    def open(
        self, *, transacted: bool = False, subscriber: str | None = None
    ) -> CelerySession:
        if transacted or subscriber:
            send_only()
        return open_session(self.app)

    def shares_topics(self) -> bool:
        return True

    def unsubscribe(self, topic: str, subscriber: str) -> None:
        send_only()

    def check(self) -> list[str]:
        return faults(lambda: self.app)
