"""This process's connections for control messages: one for each default broker it has
had.

Their brokers have short time-outs, so that they answer within a request's time.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

from django.core.signals import setting_changed

from .. import conf
from ..brokers import get_broker
from .control_connection import Channel

_channels: dict[str, Channel] = {}
_lock = threading.Lock()


def control_channel() -> Channel:
    """Return this process's connection to the default broker."""
    settings = conf.get()
    entry = settings.BROKERS["default"]
    named = f"{entry.get('BACKEND')} {entry.get('URL')!s}"
    with _lock:
        if named not in _channels:
            hurried = get_broker("default").hurried(settings.HTTP.CONTROL_TIMEOUT)
            _channels[named] = Channel(hurried)
        return _channels[named]


@atexit.register
def close_channels() -> None:
    """Close all connections, as at the process's end."""
    with _lock:
        channels = list(_channels.values())
        _channels.clear()
    for channel in channels:
        channel.close()


def _settings_changed(*, setting: str, **_: Any) -> None:
    if setting == "TXMSG":
        close_channels()


def _forked() -> None:
    # The sockets belong to the parent: the child neither uses nor closes them.
    global _lock
    _lock = threading.Lock()
    _channels.clear()


setting_changed.connect(_settings_changed, dispatch_uid="django_txmsg.channels")
os.register_at_fork(after_in_child=_forked)
