"""Publishes what follows a OnceTask, with proof like the relay: its message is
acknowledged next, and nothing else knows of its chain."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from .. import wire
from ..brokers.base import Outgoing
from ..brokers.celery.broker import open_session
from ..brokers.celery.publication import HEADER, Publication
from ..brokers.celery.session import CelerySession
from ..errors import DestinationUnavailable, DispatchRejected

#: Each thread's session, by its process and its broker.
_open = threading.local()


def publish(app: Any, publications: Sequence[Publication]) -> None:
    """Send messages to the app's broker. Raises BrokerError if it has not confirmed all
    of them; some may have been sent."""
    left = [
        Outgoing(
            one.headers.get("task", ""),
            {HEADER: one.text(), wire.CONTENT_TYPE: one.content_type},
            one.body,
        )
        for one in publications
    ]
    while True:
        session, used = _session(app)
        outcomes = session.send(left)
        unsure = [
            (one, error)
            for one, error in zip(left, outcomes, strict=True)
            if error is not None
        ]
        if not unsure:
            return
        close()
        left = [one for one, _ in unsure]
        error = unsure[0][1]
        # An idle session may have been closed by the broker meanwhile.
        if not used or isinstance(error, DispatchRejected | DestinationUnavailable):
            raise error


def close() -> None:
    """Close this thread's session, unless it belongs to the parent process."""
    kept, _open.kept = getattr(_open, "kept", None), None
    if kept is not None and kept[0][0] == os.getpid():
        kept[1].close()


def _session(app: Any) -> tuple[CelerySession, bool]:
    """Return this thread's session, and whether it was open before."""
    place = app.connection_for_write().as_uri(include_password=True)
    key = os.getpid(), app, place
    kept = getattr(_open, "kept", None)
    if kept is not None and kept[0] == key:
        return kept[1], True
    close()
    session = open_session(app)
    _open.kept = key, session
    return session, False
