"""Replaces Celery's broker in tests: the call of a task stores a row that is never
sent."""

from __future__ import annotations

from typing import NoReturn

from ..brokers.celery import CeleryBroker
from ..errors import BrokerUnavailable


class Unsent(CeleryBroker):
    """A broker that is never available. Tasks that are stored for it stay pending."""

    def open(
        self, *, transacted: bool = False, subscriber: str | None = None
    ) -> NoReturn:
        raise BrokerUnavailable(
            f"In a test nothing is sent to {self._url}, and its rows stay in the "
            f"outbox. Run the task by itself (task.apply()), or mark the test "
            f"txmsg_real_broker."
        )

    def check(self) -> list[str]:
        return []
