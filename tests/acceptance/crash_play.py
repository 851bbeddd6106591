"""Causes one fault at every step of one transaction mode.

For each step, a process runs until it reaches that step, and waits there. The fault
hits all these processes at the same time. Then the system is repaired, and all
processes continue. The test counts the effects that a customer would see.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from django.db import connection, connections

from django_txmsg.brokers import get_broker
from django_txmsg.models import DeadLetter, InboxMessage
from django_txmsg.models.queue import QueueMessage
from tests import services
from tests.acceptance.failure_table import STEPS, Outcome
from tests.app.models import Effect
from tests.faults import ManageProcess, Proxy, wait_until
from tests.running import IMPATIENT, put, ship, txmsg

Manage = Callable[..., ManageProcess]
HOOK = "tests.acceptance.crash_points.consumer"


class Play:
    """The processes, the broker and the destinations of one test."""

    def __init__(
        self, mode: str, url: str, manage: Manage, directory: Path, tag: str
    ) -> None:
        self.mode, self.url, self._manage = mode, url, manage
        self.next = f"tests.{tag}.next"
        self.go = directory / "go"
        self.stages = {
            step: f"tests.{tag}.{number}" for number, step in enumerate(STEPS[mode])
        }
        self.ids: dict[str, uuid.UUID] = {}
        self.workers: list[ManageProcess] = []

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Use settings in which the test's own process connects directly to the broker,
        without a proxy."""
        with txmsg(BROKERS={"default": {"URL": self.url}}):
            yield

    def consume(self, steps: list[str], *, point: str = "", url: str = "") -> Any:
        """Start a consumer of the stages of `steps`. The consumer waits when it reaches
        the step `point`."""
        declared = [
            {
                "destination": self.stages[step],
                "name": self.stages[step],
                "transaction": self.mode,
                "next": self.next,
            }
            for step in steps
        ]
        return self._manage(
            "consume",
            *[self.stages[step] for step in steps],
            hook=HOOK,
            txmsg={**IMPATIENT, "BROKERS": {"default": {"URL": url or self.url}}},
            env={
                "CRASH_STAGES": json.dumps(declared),
                "CRASH_POINT": point,
                "CRASH_GO": str(self.go),
            },
        )

    def bring_to(self, step: str, url: str = "") -> None:
        """Put a message into the queue of the stage for `step`, and start a consumer of
        this stage. The consumer waits when it reaches `step`. This method does not
        wait."""
        self.ids[step] = put(self.stages[step])
        self.workers.append(self.consume([step], point=step, url=url))

    def set_up(self, url: str = "") -> None:
        """For each step, start a process, and wait until it has reached that step."""
        for step in self.stages:
            self.bring_to(step, url)
        for worker, step in zip(self.workers, self.stages, strict=True):
            worker.wait_for_line(f"at {step}")

    def outcomes(self) -> dict[str, Outcome]:
        """Wait until all messages are settled, and count their effects."""
        after = {step: put(destination) for step, destination in self.stages.items()}
        arrived: Counter[str] = Counter()
        causes: dict[str, str] = {}
        with get_broker("default").open() as session:
            session.subscribe(self.next, prefetch=100)

            def at_rest() -> bool:
                ship()
                while (delivery := session.receive(0.2)) is not None:
                    message_id = delivery.headers["txmsg-id"]
                    arrived[message_id] += 1
                    causes[message_id] = json.loads(delivery.body)["from"]
                    session.ack([delivery])
                wanted = {str(one) for one in (*after.values(), *self.ids.values())}
                return (
                    wanted <= set(causes.values())
                    and not InboxMessage.objects.filter(due_at__isnull=False).exists()
                    and not QueueMessage.objects.exists()
                )

            wait_until(
                at_rest,
                deadline=100,
                message=lambda: "\n".join(one.output for one in self.workers),
            )
        return {
            step: Outcome(
                Effect.objects.filter(message_id=str(message_id)).count(),
                sum(cause == str(message_id) for cause in causes.values()),
                sum(
                    arrived[one]
                    for one, cause in causes.items()
                    if cause == str(message_id)
                ),
                DeadLetter.objects.filter(message_id=message_id).count(),
            )
            for step, message_id in self.ids.items()
        }


def killed_worker(play: Play) -> dict[str, Outcome]:
    """Kill the workers with SIGKILL; other workers take over."""
    with play.settings():
        if connection.vendor == "sqlite":
            # One writer at a time: who stands in a transaction must be gone first.
            for step in play.stages:
                play.bring_to(step)
                play.workers[-1].wait_for_line(f"at {step}")
                play.workers[-1].kill()
        else:
            play.set_up()
            for worker in play.workers:
                worker.kill()
        play.workers.append(play.consume(list(play.stages)))
        return play.outcomes()


def cut_connection(play: Play, server: services.Server) -> dict[str, Outcome]:
    """Reset the connections to the broker; the workers connect again."""
    with play.settings(), Proxy(server.port) as proxy:
        play.set_up(play.url.replace(f":{server.port}", f":{proxy.port}"))
        proxy.cut(reset=True)
        play.go.touch()
        return play.outcomes()


def killed_broker(play: Play, server: services.Server) -> dict[str, Outcome]:
    """Kill the broker with SIGKILL, and start it again."""
    with play.settings():
        with get_broker("default").open() as session:
            # RabbitMQ can lose a queue that was made a moment before it is killed.
            session.subscribe(play.next, prefetch=1)
        play.set_up()
        server.kill()
        play.go.touch()
        server.start()
        return play.outcomes()


def terminated_backends(play: Play) -> dict[str, Outcome]:
    """Terminate all database sessions of the workers."""
    with play.settings():
        play.set_up()
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        play.go.touch()
        try:
            return play.outcomes()
        finally:
            connections.close_all()
