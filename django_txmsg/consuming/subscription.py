"""Hop 6's broker side: one thread's session, subscribed to its stage's destination.

The session is opened when it is needed, and reopened after an error. If the broker is
down, or refuses the subscription, the pauses between tries grow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from .. import conf
from ..brokers import get_broker
from ..brokers.base import Broker, Delivery, Session
from ..envelope.broker_url import split_url
from ..errors import BrokerUnavailable, DestinationUnavailable
from ..runtime.breaker import AFTER_REFUSAL, SUBSCRIPTION, Breaker
from ..stages import Stage
from . import modes

#: Seconds for the connection without a name, for each host of the broker. Other threads
#: and a stop wait for it.
SECOND_TIMEOUT = 2.0


class Subscription:
    """The session of one thread. All users of the broker in this process share its
    `breaker`."""

    def __init__(self, stage: Stage, breaker: Breaker) -> None:
        self._stage, self._breaker = stage, breaker
        of_stage = partial(
            Breaker,
            stage.name,
            conf.get().RELAY.BREAKER_MAX_PAUSE,
            follows="the stage waits; its messages stay with the broker",
            first_pause=AFTER_REFUSAL,
        )
        #: The broker's error about this stage alone; other stages go on.
        self.refused = of_stage(kind=SUBSCRIPTION)
        #: Why the stage cannot send within the broker's transaction.
        self.turned_away = of_stage(kind="the sending of stage")
        self._prefetch = conf.get().CONSUME.PREFETCH
        self.session: Session | None = None
        #: Deliveries of the session that the stage must process again.
        self.held: Sequence[Delivery] = []
        #: The database in which the broker stores its messages, if it does.
        self.stored_in: str | None = None
        self._since = 0.0

    @property
    def age(self) -> float:
        """Seconds since the session was opened; 0 if no session is open."""
        return time.monotonic() - self._since if self.session is not None else 0.0

    @property
    def pause(self) -> float:
        """Seconds until the broker may be tried again."""
        breakers = (self._breaker, self.refused, self.turned_away)
        return max(one.remaining for one in breakers)

    @property
    def error(self) -> BaseException | None:
        """The broker's error that makes the stage wait, if any."""
        return self._breaker.error or self.refused.error or self.turned_away.error

    @property
    def waits(self) -> bool:
        """Whether the stage must wait before it uses the broker again."""
        broken = self.session is None and self.pause > 0
        return broken or self.turned_away.remaining > 0

    def open(self) -> Session | None:
        """Return the session; open it if necessary. Returns None while the broker is
        down. Of the threads that wait for the broker, only one tries to connect."""
        if self.session is not None:
            return self.session
        stage, subscriber = self._stage, self._stage.subscriber
        transacted = modes.of(stage).transacted
        with self._breaker.connecting:
            if self.pause:
                return None
            broker = get_broker(stage.broker)
            self.stored_in = broker.stored_in
            try:
                session = broker.open(transacted=transacted, subscriber=subscriber)
            except BrokerUnavailable as error:
                self._not_opened(broker, error)
                return None
        prefetch = 1 if transacted else max(self._prefetch, 2 * stage.batch)
        try:
            session.subscribe(
                stage.destination, prefetch=prefetch, subscriber=subscriber
            )
        except BrokerUnavailable as error:
            session.close()
            self.refused.failed(error)
            self._breaker.worked()  # it has accepted the session
            return None
        except BaseException:
            session.close()
            raise
        self.refused.worked()
        self.session, self._since = session, time.monotonic()
        return session

    def _not_opened(self, broker: Broker, error: BrokerUnavailable) -> None:
        """Record why no session could be opened. A durable subscriber's connection has
        a name of its own, which may be in use. The broker then accepts a connection
        without a name, so only the subscription is refused."""
        if self._stage.subscriber:
            url = conf.get().BROKERS[self._stage.broker].get("URL", "")
            hosts = split_url(url).netloc.count(",") + 1
            with suppress(BrokerUnavailable):
                broker.hurried(SECOND_TIMEOUT * hosts).open().close()
                self._breaker.worked()
                self.refused.failed(error)
                return
        self._breaker.failed(error)

    def close(self) -> None:
        """Close the session. The broker then delivers all unacknowledged messages
        again."""
        self.held = []
        if self.session is not None:
            session, self.session = self.session, None
            session.close()

    def failed(self, error: BrokerUnavailable) -> None:
        """Close a broken session, and pause before the broker is tried again."""
        self.close()
        self._breaker.failed(error)

    def cannot_send(self, error: DestinationUnavailable) -> None:
        """Pause, because the stage has sent to a destination that accepts no messages
        at present. If the session's connection has ended, close the session. Otherwise
        keep its deliveries: some brokers limit the number of redeliveries."""
        self.turned_away.failed(error)
        try:
            if self.session is not None:
                self.session.ping()
        except BrokerUnavailable:
            self.close()

    def rest(self) -> None:
        """End the outages of this stage and of its broker in which no error has
        occurred for a minute. Call this while the stage is paused: a paused stage does
        not contact the broker, so no success can end an outage. Other stages may still
        contact the broker and fail."""
        for one in (self._breaker, self.refused, self.turned_away):
            one.worked(opened=-math.inf)

    def worked(self, *, received: bool) -> None:
        """Record that the broker has answered. Pass `received=False` if the session
        waited, and no message came. A message that came proves nothing about the
        messages that the broker has left without an answer."""
        self._breaker.worked(opened=time.monotonic() if received else self._since)

    def sent(self) -> None:
        """Record that the broker has answered a message that the stage has sent."""
        self._breaker.worked()
