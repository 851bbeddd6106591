"""This process's connections for control messages: one for each default broker it has
had.

Their brokers have short time-outs, so that they answer within a request's time.
"""

from __future__ import annotations

import atexit
from typing import Any

from django.core.signals import setting_changed

from .. import conf
from ..brokers import get_broker
from ..runtime.per_process import PerProcess
from .control_connection import Channel


def control_channel() -> Channel:
    """Return this process's connection to the default broker."""
    entry = conf.get().BROKERS["default"]
    return _channels(f"{entry.get('BACKEND')} {entry.get('URL')!s}")


def _open(_: str) -> Channel:
    timeout = conf.get().HTTP.CONTROL_TIMEOUT
    return Channel(get_broker("default").hurried(timeout))


_channels = PerProcess(_open)


@atexit.register
def close_channels() -> None:
    """Close all connections, as at the process's end."""
    for channel in _channels.clear():
        channel.close()


def _settings_changed(*, setting: str, **_: Any) -> None:
    if setting == "TXMSG":
        close_channels()


setting_changed.connect(_settings_changed, dispatch_uid="django_txmsg.channels")
