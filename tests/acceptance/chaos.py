"""Places orders over HTTP while every component is killed, stopped, cut off and failed
over.

A web server, two relays and two consumers use PostgreSQL through PgBouncer. Killed
processes are restarted, like under systemd. Each order stores two messages, and for
each of them a stage sends one more. No message of a placed order may be lost, processed
twice or stuck.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
from django.db import DatabaseError, InterfaceError, connection, connections

from django_txmsg import Message, conf, send_message, stages
from django_txmsg.models import DeadLetter, InboxMessage, OutboxMessage
from django_txmsg.models.queue import QueueMessage
from tests.app.models import Effect, Order
from tests.faults import ManageProcess, wait_until
from tests.integration.http.server import SETTINGS, WebServer
from tests.services import PgBouncer, PostgreSQL, RabbitMQ
from tests.services.stomp_server import USER, StompServer

Manage = Callable[..., ManageProcess]
PARTS = ("pay", "ship")
#: Every lease of the run, in seconds; a process stands still for longer than that.
LEASE = 3.0
STANDSTILL = 2 * LEASE
#: Seconds in which everything has come to rest once nothing is broken any more.
REST = 180.0


def declare() -> None:
    """Declare two stages. Each stage records an effect of its message, and the first
    stage sends a message to the second one."""
    service = conf.get().SERVICE

    def effect(message: Message, what: str) -> None:
        name = f"{message.body['order']}:{message.body['part']}:{what}"
        Effect.objects.create(name=name, message_id=str(message.id))

    @stages.stage(f"{service}.orders", name=f"{service}.placed")
    def placed(message: Message) -> None:
        effect(message, "placed")
        send_message(f"{service}.done", message.body)

    @stages.stage(f"{service}.done", name=f"{service}.done")
    def done(message: Message) -> None:
        effect(message, "done")


@dataclass
class Report:
    """The result of one chaos run."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    answers: Counter[int] = field(default_factory=Counter)
    placed: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"orders {self.placed}, kills and faults {self.kills.total()}, "
            f"lost {len(self.lost)}, doubled {len(self.doubled)}, "
            f"stuck {len(self.stuck)}, dead {len(self.dead)}\n"
            f"  seed {self.seed}, answers {dict(self.answers)}\n"
            f"  {dict(sorted(self.kills.items()))}"
        )

    @property
    def clean(self) -> bool:
        """Whether no message was lost, doubled, stuck or dead."""
        return not (self.lost or self.doubled or self.stuck or self.dead)


class Chaos:
    """One chaos run: its processes, its servers and the faults."""

    def __init__(
        self,
        manage: Manage,
        directory: Path,
        service: str,
        postgres: PostgreSQL,
        pgbouncer: PgBouncer,
        broker: StompServer | None,
    ) -> None:
        self._manage, self._directory, self._service = manage, directory, service
        self._postgres, self._pgbouncer, self._broker = postgres, pgbouncer, broker
        self._enough = threading.Event()
        self._numbers = iter(range(10**9))
        self._acknowledged: set[str] = set()
        self._workers: dict[str, ManageProcess] = {}
        self._old_workers: list[ManageProcess] = []
        self._web: WebServer | None = None
        self.report = Report(seed=random.randrange(2**32))
        self._random = random.Random(self.report.seed)
        url = f"database://?poll=0.05&lease={LEASE:g}"
        self._txmsg: dict[str, Any] = {
            "SERVICE": service,
            "BROKERS": {"default": {"URL": broker.url() if broker else url}},
            "RELAY": {"LEASE": LEASE, "POLL_INTERVAL": 0.2, "BREAKER_MAX_PAUSE": 2.0},
            "CONSUME": {"POLL_INTERVAL": 0.2, "HEARTBEAT": 2.0},
            # A killed worker's attempt counts, and here they are killed in minutes.
            "REDELIVERY": {
                "MAX_REDELIVERIES": 50,
                "INITIAL_DELAY": 0.2,
                "MAX_DELAY": 2,
            },
        }
        # As in the processes, whose settings add the prefix.
        name = str(connection.settings_dict["NAME"]).removeprefix("test_")
        self._env = {
            "DJANGO_SETTINGS_MODULE": SETTINGS,
            "TXMSG_TEST_DATABASE_URL": pgbouncer.url(name),
        }

    def run(
        self, seconds: float, faults: list[Callable[[Chaos], None]], pause: float
    ) -> Report:
        """Place orders for `seconds`, cause each fault at least once, and count the
        results."""
        self._web = self._start_web()
        for name in ("relay-1", "relay-2", "consume-1", "consume-2"):
            self._start_worker(name)
        with ThreadPoolExecutor(4) as clients:
            placing = [clients.submit(self._place_orders) for _ in range(3)]
            try:
                end = time.monotonic() + seconds
                still = self._random.sample(faults, len(faults))
                while still or time.monotonic() < end:
                    self._enough.wait(self._random.uniform(0.5, 1.5) * pause)
                    self._keep_alive()
                    fault = still.pop() if still else self._random.choice(faults)
                    self.report.kills[fault.__name__] += 1
                    fault(self)
            finally:
                self._enough.set()
                for one in placing:
                    one.result()
        self._keep_alive()
        self._count()
        for worker in self._workers.values():
            self._end(worker)
        self._web.close()
        return self.report

    # What is done to them. -----------------------------------------------------------

    def web_worker_killed(self) -> None:
        """Kill one of the web server's worker processes. Its master replaces the
        process."""
        assert self._web is not None
        for pid in self._web.workers()[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()

    def web_killed(self) -> None:
        """Kill the whole web server."""
        assert self._web is not None
        self._web.close()

    def relay_killed(self) -> None:
        """Kill a relay."""
        self._workers[f"relay-{self._random.randint(1, 2)}"].kill()

    def consumer_killed(self) -> None:
        """Kill a consumer."""
        self._workers[f"consume-{self._random.randint(1, 2)}"].kill()

    def worker_stopped_in_good_order(self) -> None:
        """Send SIGTERM to a worker, like a deployment. The worker must exit with code
        0, even while other components are broken."""
        name = self._random.choice(list(self._workers))
        self._end(self._workers[name])

    def worker_stands_still(self) -> None:
        """Suspend a worker with SIGSTOP for longer than every lease, and resume it."""
        worker = self._workers[self._random.choice(list(self._workers))]
        self._stand_still([worker.pid])

    def web_stands_still(self) -> None:
        """Suspend the web processes with SIGSTOP in the middle of their requests, for
        longer than every lease."""
        assert self._web is not None
        self._stand_still(self._web.workers())

    def broker_killed(self) -> None:
        """Kill the broker, and start it again. Does nothing if the broker is the
        database."""
        if self._broker is not None:
            self._broker.kill()
            self._enough.wait(self._random.uniform(0, 3))
            self._broker.start()

    def broker_stands_still(self) -> None:
        """Suspend the broker for a while, so that it answers nothing."""
        if self._broker is not None and self._broker.process is not None:
            self._stand_still([self._broker.process.pid])

    def postgresql_killed(self) -> None:
        """Kill the database server, and start it again."""
        self._postgres.kill()
        self._enough.wait(self._random.uniform(0, 3))
        self._postgres.start()

    def postgresql_restarted(self) -> None:
        """Restart the database server in the normal way. This ends all sessions with an
        error."""
        self._postgres.restart()

    def sessions_terminated(self) -> None:
        """Terminate the database sessions of all clients."""
        self._as_administrator(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )

    def failed_over_to_read_only(self) -> None:
        """Make the database server read-only for some seconds, like a failover."""
        self._as_administrator(
            "ALTER SYSTEM SET default_transaction_read_only = on",
            "SELECT pg_reload_conf()",
        )
        self._enough.wait(self._random.uniform(2, 6))
        self._as_administrator(
            "SET transaction_read_only = off",
            "ALTER SYSTEM RESET default_transaction_read_only",
            "SELECT pg_reload_conf()",
        )

    def pgbouncer_restarted(self) -> None:
        """Stop the pooler, and start it again."""
        self._pgbouncer.restart()

    def pgbouncer_stands_still(self) -> None:
        """Suspend the pooler for a while. It then accepts connections, and answers
        nothing."""
        assert self._pgbouncer.process is not None
        self._stand_still([self._pgbouncer.process.pid])

    def disk_full(self) -> None:
        """Make PostgreSQL report a full disk for some seconds."""
        name = str(connection.settings_dict["NAME"])
        models = (OutboxMessage, InboxMessage, Effect)
        tables = [one._meta.db_table for one in models]
        self._as_administrator(
            "CREATE OR REPLACE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS"
            " $$BEGIN RAISE EXCEPTION 'could not extend file: No space left on device'"
            " USING ERRCODE = '53100'; END$$",
            *(
                f"CREATE TRIGGER no_room BEFORE INSERT ON {table}"
                f" FOR EACH STATEMENT EXECUTE FUNCTION no_room()"
                for table in tables
            ),
            database=name,
        )
        self._enough.wait(self._random.uniform(3, 8))
        self._as_administrator(
            *(f"DROP TRIGGER no_room ON {table}" for table in tables), database=name
        )

    def queue_full(self) -> None:
        """Make RabbitMQ reject all messages to our queues for some seconds."""
        policy = "full"
        self._control(
            "set_policy", policy, f"^{self._service}[.](orders|done)$",
            '{"max-length": 0, "overflow": "reject-publish"}', "--apply-to", "queues",
        )  # fmt: skip
        self._enough.wait(self._random.uniform(3, 8))
        self._control("clear_policy", policy)

    def memory_alarm(self) -> None:
        """Raise RabbitMQ's memory alarm. Until it ends, RabbitMQ reads nothing from
        publishers."""
        self._control("set_vm_memory_high_watermark", "absolute", "1MB")
        self._enough.wait(self._random.uniform(3, 8))
        self._control("set_vm_memory_high_watermark", "0.4")

    def permission_revoked(self) -> None:
        """Revoke our user's write permission on RabbitMQ. Close the connections too,
        because RabbitMQ caches permissions for each connection."""
        self._control("set_permissions", USER, ".*", "^$", ".*")
        assert isinstance(self._broker, RabbitMQ)
        self._broker.close_all_connections()
        self._enough.wait(self._random.uniform(3, 8))
        self._control("set_permissions", USER, ".*", ".*", ".*")

    def _control(self, *arguments: str) -> None:
        assert isinstance(self._broker, RabbitMQ)
        self._broker.control(*arguments)

    # How it is kept going, and counted. ----------------------------------------------

    def _stand_still(self, pids: list[int]) -> None:
        processes = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                one = psutil.Process(pid)
                one.send_signal(signal.SIGSTOP)
                processes.append(one)
        self._enough.wait(STANDSTILL)
        for one in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGCONT)

    def _end(self, worker: ManageProcess) -> None:
        """Wait until the command has started, and send SIGTERM. (While the interpreter
        starts, the process has no signal handler yet.)"""
        at_work = ("Stop with Ctrl-C", "Consuming:")
        wait_until(
            lambda: not worker.running or any(it in worker.output for it in at_work)
        )
        if worker.running:
            worker.terminate()
            worker.succeed()

    def _as_administrator(self, *statements: str, database: str = "postgres") -> None:
        with psycopg.connect(self._postgres.url(database), autocommit=True) as admin:
            for statement in statements:
                admin.execute(statement)

    def _keep_alive(self) -> None:
        """Restart killed processes, like a supervisor."""
        for name, worker in list(self._workers.items()):
            if not worker.running:
                self._start_worker(name)
        assert self._web is not None
        if self._web.process.poll() is not None:
            self._web = self._start_web()

    def _start_web(self) -> WebServer:
        return WebServer(
            self._directory, txmsg=self._txmsg, workers=2, threads=2, env=self._env
        )

    def _start_worker(self, name: str) -> None:
        command = name.partition("-")[0]
        named = [f"{self._service}.placed", f"{self._service}.done"]
        if name in self._workers:
            self._old_workers.append(self._workers[name])
        self._workers[name] = self._manage(
            *([command, *named] if command == "consume" else [command]),
            hook="tests.acceptance.chaos.declare",
            txmsg=self._txmsg,
            env=self._env,
        )

    def _place_orders(self) -> None:
        while not self._enough.wait(0.05):
            number = f"r{next(self._numbers)}"
            try:
                assert self._web is not None
                answer = self._web.post(f"order?number={number}", timeout=20)
            except httpx.TransportError:
                self.report.answers[0] += 1
                self._enough.wait(0.2)
                continue
            self.report.answers[answer.status_code] += 1
            if answer.status_code == 201:
                self._acknowledged.add(number)

    def _count(self) -> None:
        """Wait until all processes are idle, and report every effect that did not
        happen exactly once."""
        deadline = time.monotonic() + REST

        def at_rest() -> bool:
            try:
                # What a broker holds is seen by what has not happened yet.
                at_rest = not self._unfinished() and not self._not_done()[1]
                return at_rest or time.monotonic() > deadline
            except (DatabaseError, InterfaceError):
                connections.close_all()
                return False

        wait_until(at_rest, deadline=REST + 60, interval=0.5)
        report = self.report
        placed, lost = self._not_done()
        report.placed = len(placed)
        report.lost = sorted(self._acknowledged - placed) + lost
        effects = Counter(Effect.objects.values_list("name", flat=True))
        wanted = set(_effects(placed))
        report.doubled = [name for name, count in effects.items() if count > 1]
        report.doubled += sorted(set(effects) - wanted)
        report.stuck = self._unfinished()
        report.dead = [str(one) for one in DeadLetter.objects.all()]

    def _not_done(self) -> tuple[set[str], list[str]]:
        """Return the set of the order numbers of all placed orders, and a list of the
        effects that are still missing. Each order must have several effects."""
        placed = set(Order.objects.values_list("number", flat=True))
        effects = set(Effect.objects.values_list("name", flat=True))
        return placed, sorted(set(_effects(placed)) - effects)

    def _unfinished(self) -> list[str]:
        pending = OutboxMessage.objects.filter(dispatched_at=None, dead_at=None)
        waiting = InboxMessage.objects.filter(processed_at=None)
        return [
            *(f"outbox {one}" for one in pending.values_list("message_id", flat=True)),
            *(f"inbox {one}" for one in waiting.values_list("message_id", flat=True)),
            *(
                f"queue {one}"
                for one in QueueMessage.objects.values_list("queue", "id", "deliveries")
            ),
        ]

    def told(self) -> str:
        """Return the recent output of the processes."""
        workers = [*self._workers.values(), *self._old_workers[-6:]]
        said = [f"{one}\n{one.output[-1500:]}" for one in workers]
        return "\n".join([*said, self._web.log()[-3000:] if self._web else ""])


def _effects(orders: Iterable[str]) -> Iterator[str]:
    for number in orders:
        for part in PARTS:
            for what in ("placed", "done"):
                yield f"{number}:{part}:{what}"


#: What a pooler does to everybody behind it.
POOLER = [Chaos.pgbouncer_restarted, Chaos.pgbouncer_stands_still]
#: What databases do in ordinary operation.
DATABASE = [
    *POOLER,
    Chaos.disk_full,
    Chaos.failed_over_to_read_only,
    Chaos.postgresql_killed,
    Chaos.postgresql_restarted,
    Chaos.sessions_terminated,
]
PROCESSES = [
    Chaos.consumer_killed,
    Chaos.relay_killed,
    Chaos.web_killed,
    Chaos.web_stands_still,
    Chaos.web_worker_killed,
    Chaos.worker_stands_still,
    Chaos.worker_stopped_in_good_order,
]
BROKER = [Chaos.broker_killed, Chaos.broker_stands_still]
#: What RabbitMQ refuses for a while, and can be told to at run time.
REFUSALS = [Chaos.memory_alarm, Chaos.permission_revoked, Chaos.queue_full]
