"""A broker that is not part of the package passes the suite, and stages work with
it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from django_txmsg import Message, send_message
from django_txmsg.brokers import get_broker
from django_txmsg.errors import BrokerUnavailable, ConfigurationError
from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.testing.broker_suite import BrokerSuite
from tests.faults import wait_until
from tests.redis_broker import RedisBroker
from tests.running import committing, declared, running, send, ship, txmsg
from tests.services import Redis, free_port


class TestRedisStreams(BrokerSuite):
    holds_back = False
    held_for = 4.0

    @pytest.fixture(autouse=True)
    def _server(self, redis: Redis) -> None:
        self.url = f"{redis.url(1)}?lease=1"

    def broker(self) -> RedisBroker:
        return RedisBroker("tested", self.url)

    @contextmanager
    def turned_away(self, destination: str) -> Iterator[None]:
        """While the block runs, forbid the Redis user to use the stream. The user may
        use only streams whose names end in `.free`."""
        client = redis.Redis.from_url(self.url.partition("?")[0])
        with client:
            client.execute_command("ACL", "SETUSER", "default", "resetkeys", "~*.free")
            try:
                yield
            finally:
                client.execute_command("ACL", "SETUSER", "default", "~*")


def named(url: str, path: str = "tests.redis_broker.RedisBroker"):
    return txmsg(BROKERS={"default": {"BACKEND": path, "URL": url}})


@committing
@pytest.mark.postgresql
@pytest.mark.parametrize("mode", ["outbox", "best_effort_1pc", "broker_only"])
def test_stages_work_with_the_class_that_a_setting_names(
    redis: Redis, destination: str, mode: str
) -> None:
    """A setting names a project's own broker class. Stages receive and send messages
    with this class. A failing message is redelivered and finally buried."""
    got: list[int] = []

    def handler(message: Message) -> None:
        if message.body == 2:
            raise ValueError
        if message.body < 2:
            send_message(destination, message.body + 3)
        got.append(message.body)

    with (
        named(f"{redis.url(1)}?lease=1"),
        declared(handler, destination, transaction=mode) as stage,
    ):
        for number in range(3):
            send(destination, number)
        with running(stage):

            def settled() -> bool:
                ship()
                return sorted(got) == [0, 1, 3, 4] and DeadLetter.objects.exists()

            wait_until(settled, deadline=60)
        assert DeadLetter.objects.get().attempts == 3
        assert not OutboxMessage.objects.filter(dispatched_at=None).exists()
        if mode == "outbox":
            assert InboxMessage.objects.count() == 5


@committing
def test_messages_stay_in_the_outbox_while_the_broker_is_down(destination: str) -> None:
    with named(f"redis://127.0.0.1:{free_port()}"):
        with pytest.raises(BrokerUnavailable):
            send(destination, 1)
        row = OutboxMessage.objects.get()
        assert (row.attempts, row.dispatched_at) == (0, None)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("tests.nowhere.Broker", "cannot be imported"),
        ("tests.redis_broker.Nobody", "cannot be imported"),
        ("tests.redis_broker.RedisSession", "is not a subclass"),
        ("RedisBroker", "cannot be imported"),
        (".RedisBroker", "cannot be imported"),
        ("..RedisBroker", "cannot be imported"),
    ],
)
def test_invalid_backend_is_named(path: str, why: str) -> None:
    with named("redis://localhost", path), pytest.raises(ConfigurationError, match=why):
        get_broker()
