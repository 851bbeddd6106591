"""Hops 4 to 6 on ActiveMQ Classic and RabbitMQ, through the `jms` client.

Only this module and `stomp_heads` translate between the messages of this package and
`django_txmsg.jms`.
The dialects of `django_txmsg.jms` describe the differences between brokers.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from .. import jms, wire
from ..envelope.broker_url import hurry, split_url
from ..errors import (
    BrokerError,
    BrokerUnavailable,
    DestinationUnavailable,
    DispatchHeld,
    DispatchRejected,
    DispatchUnknown,
)
from ..jms import destination as destinations
from ..jms.dialect import MAX_PROPERTY
from . import deaths, java, refusals
from .base import Broker, Delivery, Outgoing, Session, acknowledges_now, faults
from .stomp_heads import Heads

Result = TypeVar("Result")
#: RabbitMQ's plugin sends an error for a message that it refuses, but for a negative
#: confirm its connection process just ends.
_WORDLESS = (
    "RabbitMQ ended the connection without an error, as it does by STOMP when a queue "
    "is full and refuses more:"
)


def answered(request: Callable[[], Result]) -> Result:
    """Call `request` and return its result. Raises BrokerUnavailable for every error of
    the jms client."""
    try:
        return request()
    except jms.MessagingError as error:
        raise BrokerUnavailable(str(error)) from error


def outcome(
    error: Any, *, alone: bool = False, dialect: str = ""
) -> BrokerError | None:
    """Convert the jms client's error for one message to a BrokerError. Return None if
    the message was stored. Pass `alone=True` if no other message was in flight."""
    if error is None:
        return None
    text = str(error)
    if isinstance(error, jms.SendHeldBackError):
        return DispatchHeld(text)
    if isinstance(
        error,
        jms.InvalidDestinationError
        | jms.MessageFormatError
        | jms.UnsupportedOperationError,
    ):
        return DispatchRejected(text)
    rejected = isinstance(error, jms.SendRejectedError)
    hung_up = isinstance(error, jms.ConnectionLostError) and not error.silent
    written = getattr(error, "written", True)
    if rejected or (alone and hung_up and written):
        if hung_up and dialect == "rabbitmq" and not error.broker_message:
            return DestinationUnavailable(f"{_WORDLESS} {text}")
        found = refusals.by_stomp(error.broker_message, text)
        if alone and isinstance(found, DispatchUnknown):
            return DestinationUnavailable(text)
        if rejected or isinstance(found, DestinationUnavailable):
            return found
    return DispatchUnknown(text, written=written, hung_up=hung_up)


def _unanswered(error: jms.MessagingError) -> DispatchUnknown:
    """Return the outcome of a transaction whose commit got no answer."""
    cause = error.__cause__
    silent = isinstance(cause, TimeoutError) or getattr(cause, "silent", False)
    return DispatchUnknown(str(error), hung_up=not silent)


#: Headers in which brokers record why they gave up on a message, and its destination.
_CAUSES = ("dlqDeliveryFailureCause", "_AMQ_ORIG_ADDRESS")
_ORIGINS = ("originalDestination", "original-destination")
#: How often a broker must hang up on a message sent alone before that counts as a
#: refusal.
HANG_UPS = 3


class StompBroker(Broker):
    """A STOMP server. Each session has its own connection."""

    def __init__(self, alias: str, url: str) -> None:
        super().__init__(alias, url)
        with contextlib.suppress(ValueError):  # check() reports it
            self.kind = dict(parse_qsl(split_url(url).query)).get("dialect", "")
        self.tls_scheme = "stomp+ssl" if url.startswith("stomp:") else ""

    def open(
        self, *, transacted: bool = False, subscriber: str | None = None
    ) -> StompSession:
        # ActiveMQ identifies a durable subscriber by its connection's client id.
        named = {} if subscriber is None else {"client_id": subscriber}
        try:
            factory = jms.ConnectionFactory(self._url, **named)
            connection = factory.create_connection()
            try:
                return StompSession(connection, transacted, self.open)
            except BaseException:  # the broker has hung up already
                connection.close()
                raise
        except (jms.MessagingError, OSError, RuntimeError, ValueError) as error:
            # OSError: a certificate's file. RuntimeError: no thread can be started, as
            # at the end of a process.
            raise BrokerUnavailable(str(error)) from error

    def hurried(self, timeout: float) -> StompBroker:
        return StompBroker(self.alias, hurry(self._url, timeout))

    def shares_topics(self) -> bool | None:
        return self.kind == "rabbitmq" if self.kind else None

    def unsubscribe(self, topic: str, subscriber: str) -> None:
        # A subscription cannot be ended by its name alone: it is resumed first, then
        # ended.
        session = self.open(subscriber=subscriber)
        with session:
            session.subscribe(topic, prefetch=1, subscriber=subscriber)
            session.end_subscription()

    def dead_letter_cause(self, headers: Mapping[str, str]) -> tuple[str, str]:
        reason, origin = deaths.cause(headers)
        reason = next((headers[name] for name in _CAUSES if name in headers), reason)
        origin = next((headers[name] for name in _ORIGINS if name in headers), origin)
        origin = origin.removeprefix("queue://").removeprefix("/queue/")
        return reason, re.sub("^(topic://|/topic/)", wire.TOPIC_PREFIX, origin)

    def check(self) -> list[str]:
        return faults(lambda: jms.ConnectionFactory(self._url))


class StompSession(Session):
    """One connection with one jms session. `another` opens a second StompSession, with
    its own connection."""

    def __init__(
        self,
        connection: jms.Connection,
        transacted: bool,
        another: Callable[[], StompSession],
    ) -> None:
        self._connection = connection
        self._another = another
        self._beside: StompSession | None = None
        self._transacted = transacted
        self._session = connection.create_session(transacted=transacted)
        self._dialect = connection.dialect
        self._producer: jms.MessageProducer | None = None
        self._consumer: jms.MessageConsumer | None = None
        self._destination = self._home = ""
        # Deliveries that the jms session's open transaction will acknowledge.
        self._enlisted: list[jms.Message] = []
        self._unsent_acks: list[jms.Message] = []
        self._acknowledged_at = time.monotonic()
        self._prefetch = 1

    def send(
        self,
        batch: Sequence[Outgoing],
        *,
        isolate: bool = False,
        timeout: float | None = None,
    ) -> list[BrokerError | None]:
        if self._transacted:
            raise BrokerError("a transacted session sends by enlist()")
        heads = Heads(self._session, self._message)
        messages = [heads.item(one) for one in batch]
        keys = [one.headers.get(wire.KEY, "") for one in batch]
        outcomes = answered(
            lambda: self._session.send_batch(
                messages, isolate=isolate, keys=keys, timeout=timeout
            )
        )
        alone = isolate or len(batch) == 1
        dialect = self._dialect.name
        return [outcome(one, alone=alone, dialect=dialect) for one in outcomes]

    def _message(self, outgoing: Outgoing) -> jms.Message:
        headers, body, dialect = dict(outgoing.headers), outgoing.body, self._dialect
        back = headers.get(wire.REPLY_TO, "")
        if back and headers.get(wire.JMS_REPLY_TO) == back:  # not a client's address
            del headers[wire.JMS_REPLY_TO]
            if dialect.serves_jms:
                # Another system may have written a name that this broker forbids.
                with contextlib.suppress(jms.InvalidDestinationError):
                    address = dialect.address(destinations.parse(back))
                    headers[wire.JMS_REPLY_TO] = address
        if dialect.serves_jms:
            body = java.for_java(headers, body)
        given = headers.get(wire.CORRELATION_ID, "")
        if dialect.name == "rabbitmq" and len(given) * 4 > MAX_PROPERTY:
            # The value may come from another system, and must not keep a service's own
            # message from leaving.
            cut = given.encode()[:MAX_PROPERTY]
            headers[wire.CORRELATION_ID] = cut.decode(errors="ignore")
        if outgoing.time_to_live is not None:
            now, left = time.time() * 1000, outgoing.time_to_live * 1000
            headers |= dialect.expiry_headers(int(now), int(left))
        return jms.Message(body, headers)

    def send_delayed(self, batch: Sequence[Outgoing]) -> list[BrokerError | None]:
        outcomes: list[BrokerError | None] = []
        with answered(self._connection.create_session) as session:
            producer = answered(session.create_producer)
            for one in batch:
                delay = jms.Delivery(delay=dt.timedelta(seconds=one.delay))
                try:
                    producer.send(
                        self._message(one), destination=one.destination, delivery=delay
                    )
                except jms.MessagingError as error:
                    outcomes.append(
                        outcome(error, alone=True, dialect=self._dialect.name)
                    )
                else:
                    outcomes.append(None)
        return outcomes

    def subscribe(
        self, destination: str, *, prefetch: int, subscriber: str | None = None
    ) -> None:
        topic = wire.is_topic(destination)
        self._destination, self._prefetch = destination, prefetch
        # The destination at which a copy reaches only this subscriber. Without a name,
        # the subscription ends with its session, and nothing is redelivered.
        self._home = (subscriber or "") if topic else destination
        self._consumer = answered(
            lambda: self._session.create_consumer(
                destination,
                prefetch=prefetch,
                subscription=subscriber if topic else None,
            )
        )

    def end_subscription(self) -> None:
        """Delete this session's durable subscription."""
        assert self._consumer is not None, "subscribe() first"
        answered(partial(self._session.unsubscribe, self._consumer))

    def receive(self, timeout: float) -> Delivery | None:
        assert self._consumer is not None, "subscribe() first"
        consumer = self._consumer
        message = answered(consumer.receive_nowait)
        if message is None:
            self._send_acks()
            message = answered(partial(consumer.receive, timeout))
        if message is None:
            if self._connection.closed:
                raise BrokerUnavailable("the connection to the broker has ended")
            return None
        if self._transacted:
            self._enlisted.append(message)
        headers, body = java.from_java(message.raw_headers, message.raw_body)
        return Delivery(
            destination=self._destination,
            headers=headers,
            body=body,
            redelivered=message.redelivered,
            broker_message_id=self._broker_id(message),
            handle=message,
            problem=message.problem or "",
            cut=message.cut,
            id_stays=self._dialect.message_ids_stay
            or "amqp-message-id" in headers
            or not self._home,
        )

    def _broker_id(self, message: jms.Message) -> str:
        """Return an id by which the consumer recognizes a redelivery of the message.

        This is the broker's id if redeliveries keep it, or if the sender has set no
        AMQP id. Otherwise it is the sender's AMQP id with a digest of the content,
        because a sender may use one id for two messages.
        """
        headers = message.raw_headers
        given = headers.get("amqp-message-id")
        if self._dialect.message_ids_stay or given is None:
            return headers.get("message-id", "")
        return f"{given}/{wire.digest(headers, message.raw_body)}"

    def send_back(self, delivery: Delivery, headers: Mapping[str, str]) -> None:
        self._store_beside(Outgoing(self._home, headers, delivery.body))
        # Acknowledged at once, not in a group: a worker that dies in between leaves two
        # messages.
        if self._transacted:
            self._commit_acks([delivery])
        else:
            answered(partial(self._session.acknowledge, delivery.handle))

    def _store_beside(self, copy: Outgoing) -> None:
        """Send the copy on another connection, because a broker may close the
        connection on which it refuses a message. If the broker closed this session's
        connection, it would redeliver all unacknowledged messages of the session."""
        error: BrokerError | None = None
        for _ in range(HANG_UPS):
            session, self._beside = self._beside or self._another(), None
            try:
                (error,) = session.send([copy], isolate=True)
            except BaseException:
                session.close()
                raise
            if error is None:
                self._beside = session
                return
            session.close()
            if not (isinstance(error, DispatchUnknown) and error.hung_up):
                break
        if isinstance(error, DestinationUnavailable):
            raise error
        if isinstance(error, DispatchUnknown) and not error.hung_up:
            raise BrokerUnavailable(str(error)) from error
        raise DispatchRejected(str(error)) from error

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        if self._transacted:
            self._commit_acks(deliveries)
            return
        self._unsent_acks += [delivery.handle for delivery in deliveries]
        if acknowledges_now(
            len(self._unsent_acks), prefetch=self._prefetch, since=self._acknowledged_at
        ):
            self._send_acks()

    def _commit_acks(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge in a transaction without messages. Raises BrokerUnavailable."""
        try:
            self.commit(deliveries)
        except BrokerError as error:
            raise BrokerUnavailable(str(error)) from error

    def _send_acks(self) -> None:
        self._acknowledged_at = time.monotonic()
        unsent, self._unsent_acks = self._unsent_acks, []
        for handle in unsent:
            answered(partial(self._session.acknowledge, handle))

    def enlist(self, outgoing: Outgoing) -> None:
        if self._producer is None:
            self._producer = answered(self._session.create_producer)
        message = self._message(outgoing)
        try:
            self._producer.send(message, destination=outgoing.destination)
        except jms.MessagingError as error:
            found = outcome(error)
            if isinstance(found, DispatchRejected):
                raise found from error
            raise BrokerUnavailable(str(error)) from error

    def commit(self, acks: Sequence[Delivery]) -> None:
        handles = [delivery.handle for delivery in acks]
        if any(one not in handles for one in self._enlisted):
            raise BrokerError("a transacted session settles what it received together")
        for handle in handles:
            if handle not in self._enlisted:
                self._session.adopt(handle)
        self._enlisted.clear()
        try:
            self._session.commit(redeliver=False)
        except jms.TransactionRolledBackError as error:
            if isinstance(error.__cause__, jms.RequestRejectedError):
                raise refusals.by_stomp(str(error), str(error)) from error
            # Lost or unanswered: no message is at fault.
            raise _unanswered(error) from error
        except jms.MessagingError as error:
            dialect = self._dialect
            found = outcome(error.__cause__, alone=True, dialect=dialect.name)
            full = isinstance(found, DestinationUnavailable)
            # Without its acknowledgement, the broker sends the delivery again.
            known = found if full and not dialect.acks_join_transaction else None
            raise known or _unanswered(error) from error

    def rollback(self) -> None:
        self._enlisted.clear()
        answered(partial(self._session.rollback, redeliver=False))

    def ping(self) -> None:
        answered(self._connection.ping)

    def close(self) -> None:
        with contextlib.suppress(BrokerUnavailable):
            self._send_acks()
        if self._beside is not None:
            self._beside.close()
            self._beside = None
        self._connection.close()
