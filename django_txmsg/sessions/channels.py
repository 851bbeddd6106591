"""This process's channels for control messages, one for each default broker it has had.

Their brokers are told to answer in the time that a request has.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any
from urllib.parse import parse_qsl

from django.core.signals import setting_changed

from .. import conf
from ..brokers import get_broker, make_broker
from ..brokers.base import Broker
from ..envelope.broker_url import split_url
from .channel import Channel

_channels: dict[str, Channel] = {}
_lock = threading.Lock()


def control_channel() -> Channel:
    """Return this process's channel to the default broker."""
    url = str(conf.get().BROKERS["default"]["URL"])
    with _lock:
        if url not in _channels:
            _channels[url] = Channel(_impatient(url))
        return _channels[url]


def _impatient(url: str) -> Broker:
    """Return the broker, told to answer in the time that a request has: each of several
    hosts in its share, so that one that is silent does not hide the next."""
    parts = split_url(url)
    if not parts.scheme.startswith("stomp"):
        return get_broker("default")
    said = dict(parse_qsl(parts.query, keep_blank_values=True))
    timeout = conf.get().HTTP.CONTROL_TIMEOUT
    limits = {
        "connect_timeout": timeout / len(parts.netloc.split(",")),
        "send_timeout": timeout,
        "close_timeout": timeout,
    }
    more = [f"{name}={limit:g}" for name, limit in limits.items() if name not in said]
    query = "&".join(filter(None, [parts.query, *more]))
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


setting_changed.connect(_settings_changed, dispatch_uid="django_txmsg.channels")
os.register_at_fork(after_in_child=_forked)
