"""Web processes are killed at random under load, and no relay runs. No message is lost
or doubled.

The tests use PostgreSQL and ActiveMQ. `make test` sends 200 requests, and `make soak`
sends 2,000.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage, SessionRecord
from tests.app.models import Effect, Order
from tests.faults import wait_until
from tests.services import ActiveMQ

from .server import SETTINGS, WebServer

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.postgresql,
    pytest.mark.timeout(1800),
]

#: How a request ends: most well, some by an exception, an error or a bad commit.
ENDINGS = ["", "", "", "", "", "raise", "503", "bad_commit"]
PARTS = ("pay", "ship")


class Killer(threading.Thread):
    """Kills a random worker of the web server with SIGKILL, repeatedly."""

    def __init__(self, web: WebServer, every: float, seed: int) -> None:
        super().__init__(daemon=True)
        self._web, self._every = web, every
        self._random = random.Random(seed)
        self._enough = threading.Event()
        self.kills = 0

    def run(self) -> None:
        while not self._enough.wait(self._random.uniform(0.2, 1.8) * self._every):
            workers = self._web.workers()
            if workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._random.choice(workers), signal.SIGKILL)
                self.kills += 1

    def stop(self) -> None:
        self._enough.set()
        self.join(30)


@pytest.mark.parametrize("requests", [200, pytest.param(2000, marks=pytest.mark.soak)])
def test_orders_and_their_effects_agree_after_random_kills(
    activemq: ActiveMQ, manage, destination: str, tmp_path: Path, requests: int
) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    plan = [(f"r{number}", chance.choice(ENDINGS)) for number in range(requests)]
    txmsg = {
        "SERVICE": destination,
        "BROKERS": {"default": {"URL": activemq.url()}},
        "RELAY": {"LEASE": 3},
    }
    env = {"DJANGO_SETTINGS_MODULE": SETTINGS}
    consumer = manage("consume", f"{destination}.orders", txmsg=txmsg, env=env)
    consumer.wait_for_line("Consuming")

    with WebServer(tmp_path, txmsg=txmsg, workers=3, preload=True) as web:
        killer = Killer(web, 0.5, seed)

        def request(planned: tuple[str, str]) -> tuple[str, int]:
            number, then = planned
            try:
                response = web.post(f"order?number={number}&then={then}", timeout=30)
            except httpx.TransportError:
                return number, 0
            return number, response.status_code

        killer.start()
        with ThreadPoolExecutor(6) as pool:
            answers = dict(pool.map(request, plan))
        killer.stop()
        web.kill()

    told = f"seed {seed}, {killer.kills} kills, {Counter(answers.values())}"
    placed = set(Order.objects.values_list("number", flat=True))
    assert killer.kills > requests / 100, told
    assert {number for number, status in answers.items() if status == 201} <= placed
    assert not placed & {number for number, status in answers.items() if status >= 500}
    assert not placed & {number for number, then in plan if then}, told

    expected = Counter(f"{number}:{part}" for number in placed for part in PARTS)

    def complete() -> bool:
        pending = OutboxMessage.objects.filter(dispatched_at=None).count()
        return not pending and Effect.objects.count() >= expected.total()

    wait_until(complete, deadline=120, message=lambda: f"{told}\n{consumer.output}")
    consumer.terminate()
    consumer.succeed()
    assert Counter(Effect.objects.values_list("name", flat=True)) == expected, told
    sent = set(OutboxMessage.objects.values_list("message_id", flat=True))
    processed = InboxMessage.objects.all()
    assert set(processed.values_list("message_id", flat=True)) == sent, told
    assert not DeadLetter.objects.exists(), told
    assert not SessionRecord.objects.exists(), told
