"""A consumer that receives messages, does not acknowledge them, and waits to be
killed."""

from __future__ import annotations

from django_txmsg.brokers import make_broker
from django_txmsg.testing.broker_suite import take
from tests.faults import hang_here


def hold(url: str, destination: str) -> None:
    """Receive two messages, and keep them unacknowledged."""
    session = make_broker("held", url).open()
    session.subscribe(destination, prefetch=2)
    take(session, 2)
    hang_here("holds 2")
