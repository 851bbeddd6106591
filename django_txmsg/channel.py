"""Step 3 of an HTTP request: hands one control message to the broker, with a receipt.

Keeps broker sessions open between requests, as many as have sent at the same time. A
session that has gone stale is replaced without the request noticing; a broker that is
down is left alone for a while, so that an outage costs a request no waiting.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import Any
from urllib.parse import parse_qsl

from django.core.signals import setting_changed

from . import conf
from .breaker import Breaker
from .broker_url import split_url
from .brokers import get_broker, make_broker
from .brokers.base import Broker, Outgoing, Session
from .errors import BrokerError, BrokerUnavailable, DispatchRejected

#: Longest pause, in seconds, between probes of a broker that is down.
MAX_PAUSE = 5.0


class Channel:
    """Open sessions with one broker, each in the hands of one thread at a time."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._idle: list[Session] = []
        self._breaker = Breaker(broker.alias, MAX_PAUSE)

    def send(self, outgoing: Outgoing) -> None:
        """Hand over one message and return once the broker has given its receipt.

        Raises BrokerError: BrokerUnavailable at once while the broker is left alone.
        """
        if self._breaker.remaining:
            raise BrokerUnavailable(
                f"broker {self.broker.alias!r} did not answer a moment ago"
            )
        try:
            if not self._send_as_before(outgoing):
                self._send_afresh(outgoing)
        except DispatchRejected:
            raise
        except BrokerError as error:
            self._breaker.failed(error)
            raise
        self._breaker.worked()

    def close(self) -> None:
        """End the conversations that nobody is in."""
        while self._idle:
            self._idle.pop().close()

    def _discard(self) -> None:
        while self._idle:
            _close_aside(self._idle.pop())

    def _send_as_before(self, outgoing: Outgoing) -> bool:
        """Try a session of an earlier request. False when it is of no use any more."""
        try:
            session = self._idle.pop()
        except IndexError:
            return False
        began = time.monotonic()
        try:
            self._send_in(session, outgoing)
        except DispatchRejected:
            raise
        except BrokerError:
            # A broker that lets us wait does so on a new connection too.
            if time.monotonic() - began > conf.get().HTTP.CONTROL_TIMEOUT / 2:
                raise
            # The others are as old: one broken connection is seldom alone.
            self._discard()
            return False
        return True

    def _send_afresh(self, outgoing: Outgoing) -> None:
        self._send_in(self.broker.open(), outgoing)

    def _send_in(self, session: Session, outgoing: Outgoing) -> None:
        try:
            (outcome,) = session.send([outgoing])
        except BaseException:
            _close_aside(session)
            raise
        if outcome is not None:
            _close_aside(session)
            raise outcome
        self._idle.append(session)


def _close_aside(session: Session) -> None:
    """Close without making the request wait for a broker that does not answer."""
    threading.Thread(
        target=session.close, name="txmsg-control-close", daemon=True
    ).start()


_channels: dict[str, Channel] = {}
_lock = threading.Lock()


def control_channel() -> Channel:
    """Return this process's channel to the default broker."""
    url = str(conf.get().BROKERS["default"]["URL"])
    channel = _channels.get(url)
    if channel is None:
        with _lock:
            channel = _channels.get(url)
            if channel is None:
                channel = _channels[url] = Channel(_impatient(url))
    return channel


def _impatient(url: str) -> Broker:
    """Return the broker, told to answer in the time that a request has."""
    parts = split_url(url)
    if not parts.scheme.startswith("stomp"):
        return get_broker("default")
    said = dict(parse_qsl(parts.query, keep_blank_values=True))
    timeout = f"{conf.get().HTTP.CONTROL_TIMEOUT:g}"
    limits = {
        name: timeout
        for name in ("connect_timeout", "send_timeout", "close_timeout")
        if name not in said
    }
    query = "&".join(filter(None, [parts.query, *map("=".join, limits.items())]))
    return make_broker("default", parts._replace(query=query).geturl())


@atexit.register
def close_channels() -> None:
    """End all conversations with brokers, as at the process's end."""
    with _lock:
        channels = list(_channels.values())
        _channels.clear()
    for channel in channels:
        channel.close()


def _settings_changed(*, setting: str, **_: Any) -> None:
    if setting == "TXMSG":
        close_channels()


def _forked() -> None:
    # The sockets are the parent's: the child neither uses nor closes them.
    global _lock
    _lock = threading.Lock()
    _channels.clear()


setting_changed.connect(_settings_changed, dispatch_uid="django_txmsg.channel")
os.register_at_fork(after_in_child=_forked)
