"""Hop 4 for Celery: tasks' messages go to the broker that Celery's workers consume.

`celery://module:app` names an app; kombu sends the messages to that app's broker. Only
Celery's workers receive from it.
"""

from __future__ import annotations

import contextlib
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError
from kombu.utils.imports import symbol_by_name

from ...envelope.broker_url import split_url
from ...errors import BrokerUnavailable, ConfigurationError
from ..base import Broker
from .session import TIMEOUT, CelerySession, ends, send_only


def load_app(url: str) -> Any:
    """Return the app that a celery:// URL names. Raises ConfigurationError."""
    path = split_url(url).netloc
    module, _, name = path.partition(":")
    try:
        app = symbol_by_name(f"{module}:{name or 'app'}")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"{path!r} names no Celery app, as in celery://shop.celery:app: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(app, Celery):
        raise ConfigurationError(
            f"{path!r} is {type(app).__name__}, and not a Celery app."
        )
    return app


def open_session(app: Any) -> CelerySession:
    """Return a session with an app's broker. Raises BrokerUnavailable."""
    # This package requests confirms itself, for a whole batch. It reads nothing between
    # sends, so the server must not wait for heartbeats.
    connection = app.connection_for_write(
        heartbeat=0, transport_options={"confirm_publish": False}
    )
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
    """The broker of a Celery app, for tasks' messages only."""

    consumable = False
    kind = "celery"

    @property
    def app(self) -> Any:
        """The app that the URL names. Raises ConfigurationError."""
        return load_app(self._url)

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
        try:
            load_app(self._url)
        except ConfigurationError as error:
            return [str(error)]
        return []
