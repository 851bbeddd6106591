"""The same task, a row in a transaction, on each backend, chosen by settings alone.

    python -m benchmarks.workers [--tasks 1500] [--rounds 2] [--only NAME,NAME]

For each backend it measures the rate of the middle 80 % of the effects, by the
database's clock; the rate of enqueueing in a transaction with a row; the latency of an
idle system; the processor time of a task; and the tasks that are lost or doubled by a
SIGKILL of the worker. The peers run in a separate environment, which is created on
demand.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg

from . import stand

ROOT = Path(__file__).resolve().parents[1]
PEERS = ["celery", "dramatiq[rabbitmq]", "django-dramatiq", "django-tasks-db",
         "procrastinate", "psycopg[binary]", "django-environ", "psutil"]  # fmt: skip
PROJECT = "benchmarks._workers_project"
#: Fewest tasks of a round.
FEWEST = 500
CELERY = ["celery", "-A", "benchmarks._workers_celery", "worker", "--loglevel", "ERROR",
          "--concurrency", "2", "--without-gossip", "--without-mingle"]  # fmt: skip
RUN = [PROJECT, "txmsg", "run", "--verbosity", "0"]


@dataclass(frozen=True)
class Contender:
    """A backend: its environment, and the command of its worker."""

    backend: str
    worker: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def contenders(amqp: str) -> dict[str, Contender]:
    """Return the backends by name. `amqp` is the broker's URL."""
    return {
        "database://": Contender("txmsg", RUN),
        "database:// two processes": Contender("txmsg", [*RUN, "--processes", "2"]),
        "database:// batches of 50": Contender("txmsg", RUN, {"BENCH_BATCH": "50"}),
        "amqp://": Contender("txmsg", RUN, {"BENCH_URL": amqp}),
        "amqp:// batches of 50": Contender(
            "txmsg", RUN, {"BENCH_URL": amqp, "BENCH_BATCH": "50"}
        ),
        "django-tasks-db": Contender(
            "django-tasks-db", [PROJECT, "db_worker", "--interval", "0.1"]
        ),
        "procrastinate": Contender(
            "procrastinate", [PROJECT, "procrastinate", "worker"]
        ),
        "Celery prefork 2 acks late": Contender("celery", CELERY),
        "Celery CONN_MAX_AGE=0": Contender("celery", CELERY, {"BENCH_MAX_AGE": "0"}),
        "dramatiq 2 processes": Contender(
            "dramatiq",
            ["dramatiq", "--processes", "2", "--threads", "1",
             "django_dramatiq.setup", "benchmarks._workers_tasks"],
        ),
    }  # fmt: skip


def main() -> None:
    """Measure each contender in turns, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone", type=int, default=50, help="tasks for the latency")
    parser.add_argument("--only", default="", help="these backends, by commas")
    options = parser.parse_args()
    if options.tasks < FEWEST:
        # A worker that has finished before it is first looked at has no rate.
        parser.error(f"--tasks: at least {FEWEST}")
    from tests import services
    from tests.services.stomp_server import PASSWORD, USER

    rabbitmq = services.shared(services.RabbitMQ)
    amqp = f"amqp://{USER}:{PASSWORD}@127.0.0.1:{rabbitmq.amqp_port}"
    python = environment()
    wanted = set(filter(None, options.only.split(",")))
    benches = {
        name: Bench(name, one, python, f"{amqp}/")
        for name, one in contenders(amqp).items()
        if not wanted or name in wanted
    }
    figures: dict[str, dict[str, list[float]]] = {}
    for number in range(options.rounds):
        for name, bench in benches.items():
            print(f"  round {number + 1}: {name}", file=sys.stderr, flush=True)
            for what, value in bench.round(options.tasks, options.alone):
                figures.setdefault(what, {}).setdefault(name, []).append(value)
    base = next(iter(benches))
    for what, unit in (
        ("tasks", "tasks/s"),
        ("enqueue", "tasks/s"),
        ("latency, p50", "ms"),
        ("latency, p99", "ms"),
        ("processor time", "ms a task"),
    ):
        stand.table(f"workers: {what}", figures[what], base, unit)
    print(f"\n{'after a SIGKILL of the worker':48} {'lost':>10} {'doubled':>10}")
    for name in benches:
        lost, doubled = figures["lost"][name], figures["doubled"][name]
        print(f"{name:48} {max(lost):10.0f} {max(doubled):10.0f}")


class Bench:
    """One contender on a database of its own."""

    def __init__(self, name: str, given: Contender, python: str, amqp: str) -> None:
        self._given, self._python = given, python
        url = stand.postgresql("workers_" + "".join(filter(str.isalnum, name))[:30])
        self._database = psycopg.connect(url, autocommit=True)
        self._environment = {
            **os.environ,
            **given.environment,
            "BENCH_BACKEND": given.backend,
            "BENCH_DATABASE": url,
            "BENCH_AMQP": amqp,
            "DJANGO_SETTINGS_MODULE": PROJECT,
            "PYTHONPATH": str(ROOT),
            "C_FORCE_ROOT": "1",
        }
        self._ask("CREATE TABLE bench_call (task bigint)")
        self._ask(
            "CREATE TABLE bench_effect (task bigint, at timestamptz NOT NULL DEFAULT "
            "clock_timestamp())"
        )
        self._project("migrate", "--verbosity", "0")

    def round(self, tasks: int, alone: int) -> Iterator[tuple[str, float]]:
        """Yield each figure of one round."""
        self._empty()
        yield "enqueue", self._project("enqueue", str(tasks))
        with self._worker() as worker:
            self._wait_for(tasks // 10, 60)
            (first,) = self._ask("SELECT count(*) FROM bench_effect")
            before = processor_time(worker)  # it has started
            self._wait_for(tasks, 60 + tasks / 10)
            used = processor_time(worker) - before
        (seconds,) = self._ask(
            "SELECT EXTRACT(EPOCH FROM percentile_disc(0.9) WITHIN GROUP (ORDER BY at)"
            " - percentile_disc(0.1) WITHIN GROUP (ORDER BY at)) FROM bench_effect"
        )
        yield "tasks", 0.8 * tasks / float(seconds)
        yield "processor time", 1000 * used / max(1, tasks - first)
        yield from self._latency(alone)
        yield from self._killed(tasks // 3)

    def _latency(self, count: int) -> Iterator[tuple[str, float]]:
        self._empty()
        self._ask("ALTER TABLE bench_call ADD at timestamptz DEFAULT clock_timestamp()")
        with self._worker():
            self._project("enqueue", "1")
            self._wait_for(1, 60)
            self._empty()
            self._project("alone", str(count), "0.2")
            self._wait_for(count, 60)
        (found,) = self._ask(
            "SELECT array_agg(EXTRACT(EPOCH FROM e.at - c.at)) FROM bench_effect e "
            "JOIN bench_call c USING (task)"
        )
        self._ask("ALTER TABLE bench_call DROP at")
        waits = sorted(1000 * float(one) for one in found)
        yield "latency, p50", statistics.median(waits)
        yield "latency, p99", waits[min(len(waits) - 1, int(0.99 * len(waits)))]

    def _killed(self, count: int) -> Iterator[tuple[str, float]]:
        self._empty()
        self._project("enqueue", str(count))
        with self._worker():
            self._wait_for(count // 3, 120)
        with self._worker(), contextlib.suppress(TimeoutError):
            self._wait_for(count, 90, distinct=True)
        rows, tasks = self._ask(
            "SELECT count(*), count(DISTINCT task) FROM bench_effect"
        )
        yield "lost", count - tasks
        yield "doubled", rows - tasks

    @contextlib.contextmanager
    def _worker(self) -> Iterator[psutil.Process]:
        """Run the worker; at the end it is killed, with everything it started."""
        command = [self._python, "-m", *self._given.worker]
        worker = subprocess.Popen(
            command, env=self._environment, cwd=ROOT, start_new_session=True
        )
        try:
            yield psutil.Process(worker.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()

    def _project(self, *arguments: str) -> float:
        done = subprocess.run(
            [self._python, "-m", PROJECT, *arguments],
            env=self._environment,
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return float(done.stdout.split()[-1]) if done.stdout.split() else 0.0

    def _wait_for(self, count: int, seconds: float, *, distinct: bool = False) -> None:
        what = "count(DISTINCT task)" if distinct else "count(*)"
        end = time.monotonic() + seconds
        while self._ask(f"SELECT {what} FROM bench_effect")[0] < count:
            if time.monotonic() > end:
                raise TimeoutError(f"{self._given.backend}: not {count} effects")
            time.sleep(0.1)

    def _empty(self) -> None:
        self._ask("TRUNCATE bench_call, bench_effect")

    def _ask(self, sql: str) -> Any:
        cursor = self._database.execute(sql.encode())
        return (cursor.fetchone() or ()) if cursor.description else ()


def processor_time(worker: psutil.Process) -> float:
    """Return the seconds of processor time of a worker and its children."""
    total = 0.0
    for one in [worker, *worker.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def environment() -> str:
    """Return the Python of an environment that has this package and its peers."""
    home = Path(tempfile.gettempdir()) / "txmsg-bench-workers"
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        ours = f"{ROOT}[amqp,tasks]"
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q", "-e", ours, *PEERS], check=True
        )
    return str(python)


if __name__ == "__main__":
    main()
