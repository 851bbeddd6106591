"""Tests of a broker class. If your class passes the tests, the relay and the consumer
work with it.

Needs pytest. A class in your tests creates the broker:

    from django_txmsg.testing.broker_suite import BrokerSuite

    class TestMyBroker(BrokerSuite):
        def broker(self):
            return MyBroker("tested", "my://localhost")

Each test uses destinations that no test has used before.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

pytest.register_assert_rewrite(
    *(f"{__name__}.{name}" for name in ("receiving", "sending", "talk"))
)

# After the line above, which makes failed assertions show their values.
from .receiving import Receiving, Together, Topics  # noqa: E402
from .sending import Sending, Transactions  # noqa: E402
from .talk import SOON, Capabilities, bodies, take  # noqa: E402

__all__ = ["SOON", "BrokerSuite", "bodies", "take"]


class BrokerSuite(Capabilities, Sending, Receiving, Together, Transactions, Topics):
    """Tests of the contract of `django_txmsg.brokers.Broker` and `.Session`. Your
    method `broker()` must create a new broker at each call. Several threads may call
    it."""

    @pytest.fixture
    def destination(self) -> str:
        """A destination that no test has used before."""
        return f"tests.{uuid.uuid4().hex}"

    @pytest.fixture(autouse=True)
    def _sessions(self) -> Iterator[None]:
        with ExitStack() as self.stack:
            yield
