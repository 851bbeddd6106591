"""Fixtures for tests of control messages, and of the middleware in the test's own
process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections
from django.test import override_settings

from django_txmsg import signals
from django_txmsg.models import OutboxMessage, QueueMessage, SessionRecord
from tests.app.models import Order
from tests.faults import wait_until

MIDDLEWARE = ["django_txmsg.middleware.OutboxMiddleware"]


def txmsg(**http: Any) -> dict[str, Any]:
    """Return settings for a broker whose messages are in the second database."""
    return {
        "SERVICE": "web",
        "BROKERS": {"default": {"URL": "database://other?poll=0.01"}},
        "DISPATCH_ON_COMMIT": "off",
        "HTTP": http,
    }


def control_messages() -> int:
    """Return how many control messages the broker has."""
    queue = QueueMessage.objects.using("other").filter(queue="web.txmsg.control")
    return queue.count()


def nothing_happened() -> bool:
    """Return whether the request stored nothing: no data, no message and no control
    message."""
    return not (
        Order.objects.exists()
        or OutboxMessage.objects.exists()
        or control_messages()
        or SessionRecord.objects.exists()
    )


def wait_for_the_database(seconds: float) -> None:
    """Wait until `seconds` have passed by the database's clock."""

    def now() -> float:
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT extract(epoch FROM clock_timestamp())::float8")
            return float(cursor.fetchone()[0])

    until = now() + seconds
    wait_until(lambda: now() > until)


@pytest.fixture
def web() -> Iterator[Callable[..., override_settings]]:
    """Serve the views of this package behind the middleware."""
    with override_settings(
        ROOT_URLCONF="tests.integration.http.urls", MIDDLEWARE=MIDDLEWARE, TXMSG=txmsg()
    ):
        yield lambda **http: override_settings(TXMSG=txmsg(**http))


@pytest.fixture
def heard() -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Collect the arguments of the three signals of sessions."""
    said: dict[str, list[dict[str, Any]]] = {"ended": [], "sent": [], "handled": []}
    names = {
        "ended": signals.session_ended,
        "sent": signals.control_message_sent,
        "handled": signals.control_message_handled,
    }

    receivers = []
    for name, signal in names.items():

        def receive(name: str = name, **facts: Any) -> None:
            said[name].append(facts)

        signal.connect(receive)
        receivers.append((signal, receive))
    yield said
    for signal, receive in receivers:
        signal.disconnect(receive)
