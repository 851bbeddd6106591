"""Runs the same task, which inserts one row in a transaction, on several task backends.

    python -m benchmarks.workers [--tasks 1000] [--rounds 2] [--only NAME,NAME]

For each backend it measures:

- the rate of the middle 80 % of the effects, by the database's clock, with and without
  persistent connections;
- the rate of enqueueing, in a transaction with a row;
- the latency of an idle system;
- the processor time per task;
- after a SIGKILL of the worker: the number of tasks that did not run within 90 seconds,
  and the number of tasks that ran twice.

Everything runs in a separate environment, which is created on demand. Each figure is
stored in a file as soon as it is measured. With `--keep FILE`, a new run continues
where an earlier run with the same file ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import psycopg

from . import stand

ROOT = Path(__file__).resolve().parents[1]
PEERS = ["celery", "dramatiq[rabbitmq]", "django-dramatiq", "django-tasks-db",
         "procrastinate", "psycopg[binary]", "django-environ", "psutil"]  # fmt: skip
#: They need Python 3.12.
NEW_PEERS = ["dj-queue", "steady-queue"]
PROJECT = "benchmarks._workers_project"
#: Seconds that a task has after a SIGKILL of its worker. Every backend that can find
#: a lost worker has done so by then.
RECOVERY = 90.0
CELERY = ["celery", "-A", "benchmarks._workers_celery", "worker", "--loglevel", "ERROR",
          "--concurrency", "2", "--without-gossip", "--without-mingle"]  # fmt: skip
RUN = [PROJECT, "txmsg", "run", "--verbosity", "0"]
#: The columns of the table: a figure, its title, its format.
COLUMNS = [
    ("rate", "tasks/s", "8.0f"), ("alone", "no keep", "8.0f"),
    ("enqueue", "enqueue", "8.0f"), ("p50", "p50 ms", "8.1f"),
    ("p99", "p99 ms", "8.1f"), ("processor", "cpu ms", "8.2f"),
    ("lost", "not run", "8.0f"), ("doubled", "doubled", "8.0f"),
]  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """A backend, with its environment variables and the command of its worker."""

    backend: str
    worker: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def contenders(amqp: str) -> dict[str, Contender]:
    """Return a dict from names to backends. `amqp` is the URL of the AMQP broker."""
    batch, broker = {"BENCH_BATCH": "50"}, {"BENCH_URL": amqp}
    three = {"BENCH_CONCURRENCY": "3"}  # as dj-queue does if nothing is said
    return {
        "database://": Contender("txmsg", RUN),
        "database:// two processes": Contender("txmsg", [*RUN, "--processes", "2"]),
        "database:// concurrency 3": Contender("txmsg", RUN, three),
        "database:// batches of 50": Contender("txmsg", RUN, batch),
        "amqp://": Contender("txmsg", RUN, broker),
        "amqp:// batches of 50": Contender("txmsg", RUN, {**broker, **batch}),
        "procrastinate": Contender(
            "procrastinate", [PROJECT, "procrastinate", "worker"]
        ),
        "dj-queue": Contender("dj-queue", [PROJECT, "dj_queue"]),
        "django-tasks-db": Contender(
            "django-tasks-db", [PROJECT, "db_worker", "--interval", "0.1"]
        ),
        "steady-queue": Contender("steady-queue", [PROJECT, "steady_queue"]),
        "Celery prefork 2 acks late": Contender("celery", CELERY),
        "dramatiq 2 processes": Contender(
            "dramatiq",
            ["dramatiq", "--processes", "2", "--threads", "1",
             "django_dramatiq.setup", "benchmarks._workers_tasks"],
        ),
    }  # fmt: skip


def main() -> int:
    """Measure all contenders alternately, and print the table. Returns 1 if a figure
    could not be measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone", type=int, default=100, help="tasks for the latency")
    parser.add_argument("--only", default="", help="these backends, by commas")
    parser.add_argument("--python", default="", help="the interpreter of all backends")
    parser.add_argument("--keep", default="", help="the file of the figures")
    options = parser.parse_args()
    from tests import services
    from tests.services.stomp_server import PASSWORD, USER

    python, absent = environment(options.python or newest())
    for name in absent:
        print(f"{name} needs Python 3.12: see --python", file=sys.stderr)
    rabbitmq = services.shared(services.RabbitMQ)
    amqp = f"amqp://{USER}:{PASSWORD}@127.0.0.1:{rabbitmq.amqp_port}"
    wanted = set(filter(None, options.only.split(",")))
    benches = {
        name: Bench(name, one, python, f"{amqp}/")
        for name, one in contenders(amqp).items()
        if name not in absent and (not wanted or name in wanted)
    }
    figures = Figures(options.keep)
    for number in range(options.rounds):
        for name, bench in benches.items():
            figures.add(name, f"rate {number}", partial(bench.rate, options.tasks))
            figures.add(name, f"alone {number}", partial(bench.rate, options.tasks, 0))
    for name, bench in benches.items():
        figures.add(name, "latency", partial(bench.latency, options.alone))
    # No time is measured here, so that all can wait for their recovery at once.
    count = max(60, options.tasks // 3)
    kills = {name: bench.killed(count) for name, bench in benches.items()}
    for name, kill in kills.items():
        figures.add(name, "killed", kill.__next__)
    for name, kill in kills.items():
        figures.add(name, "recovered", kill.__next__)
    figures.table(list(benches))
    print(versions(python))
    return figures.failed


class Figures:
    """The measured figures. A file stores one line of JSON for each step of a
    contender."""

    def __init__(self, keep: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="txmsg-bench-"))
        self._file = Path(keep) if keep else folder / "workers.jsonl"
        self._file.touch()
        rows = map(json.loads, self._file.read_text().splitlines())
        self._steps = {(row["name"], row["step"]): row["figures"] for row in rows}
        self.failed = 0

    def add(
        self, name: str, step: str, measure: Callable[[], dict[str, float]]
    ) -> None:
        """Measure a step, unless the file already has its figures. A failed step is
        reported and skipped."""
        if (name, step) in self._steps:
            return
        began = time.monotonic()
        try:
            found = measure()
        except (StopIteration, TimeoutError, psutil.Error, psycopg.Error,
                subprocess.CalledProcessError) as error:  # fmt: skip
            self.failed = 1
            print(f"  {step}: {name} FAILED: {error!r}", file=sys.stderr, flush=True)
            return
        self._steps[name, step] = found
        row = {"name": name, "step": step, "figures": found}
        with self._file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        said = ", ".join(f"{what} {value:,.1f}" for what, value in found.items())
        took = f"({time.monotonic() - began:.0f} s)"
        print(f"  {step}: {name}: {said} {took}", file=sys.stderr, flush=True)

    def table(self, names: list[str]) -> None:
        """Print one row for each contender: the medians of its figures, and the rate of
        the first contender divided by the rate of this contender."""
        ours = self._all(names[0], "rate")
        print(f"\nworkers: medians; {len(ours)} rounds")
        print(f"{'':27}" + "".join(f"{title:>9}" for _, title, _ in COLUMNS), end="")
        print(f"{'ratio':>9}")
        for name in names:
            line = f"{name:27}"
            for what, _, form in COLUMNS:
                values = self._all(name, what)
                line += (
                    f" {statistics.median(values) if values else float('nan'):{form}}"
                )
            ratios = [
                a / b for a, b in zip(ours, self._all(name, "rate"), strict=False)
            ]
            print(line, f"{statistics.median(ratios):8.2f}" if ratios else "")
        print(
            "tasks/s: with persistent connections; no keep: with CONN_MAX_AGE=0.\n"
            f"cpu: of the worker, a task. not run, doubled: {RECOVERY:.0f} s after a "
            f"SIGKILL.\nratio: {names[0]} divided by this one. "
            f"Each figure: {self._file}"
        )
        self._note(names)

    def _note(self, names: list[str]) -> None:
        peers = [one for one in names if "://" not in one and self._all(one, "rate")]
        if not peers:
            return
        fastest = max(peers, key=lambda one: statistics.median(self._all(one, "rate")))
        for name in names:
            goals = {names[0]: "≥ 1.5", "database:// batches of 50": "≥ 3"}
            pairs = zip(
                self._all(name, "rate"), self._all(fastest, "rate"), strict=False
            )
            ratios = [one / other for one, other in pairs]
            if ratios and name != fastest:
                stand.note(f"workers: {name}", fastest, ratios, goals.get(name, ""))

    def _all(self, name: str, what: str) -> list[float]:
        return [
            found[what]
            for (owner, _), found in self._steps.items()
            if owner == name and what in found
        ]


class Bench:
    """A contender with a separate database."""

    def __init__(self, name: str, given: Contender, python: str, amqp: str) -> None:
        self._given, self._python = given, python
        url = stand.postgresql("workers_" + "".join(filter(str.isalnum, name))[:30])
        self._database = psycopg.connect(url, autocommit=True)
        self._environment = {
            **os.environ,
            **given.environment,
            "BENCH_BACKEND": given.backend,
            # Two contenders run at once after the kills: each has queues of its own.
            "BENCH_SERVICE": "".join(filter(str.isalnum, name)).lower(),
            "BENCH_DATABASE": url,
            "BENCH_AMQP": amqp,
            "DJANGO_SETTINGS_MODULE": PROJECT,
            "PYTHONPATH": str(ROOT),
            "C_FORCE_ROOT": "1",
        }
        self._ask(
            "CREATE TABLE bench_call (task bigint, at timestamptz NOT NULL DEFAULT "
            "clock_timestamp())"
        )
        self._ask(
            "CREATE TABLE bench_effect (task bigint, at timestamptz NOT NULL DEFAULT "
            "clock_timestamp())"
        )
        self._project("migrate", "--verbosity", "0")

    def rate(self, tasks: int, max_age: int = 600) -> dict[str, float]:
        """Return the rate of enqueueing and the rate of the worker. `max_age` is the
        number of seconds for which a connection is kept."""
        self._environment["BENCH_MAX_AGE"] = str(max_age)
        try:
            self._empty()
            enqueue = self._project("enqueue", str(tasks))
            with self._worker() as worker:
                self._wait_for(tasks // 10, 60)
                (first,) = self._ask("SELECT count(*) FROM bench_effect")
                before = processor_time(worker)  # it has started
                self._wait_for(tasks, 60 + tasks / 10)
                used = processor_time(worker) - before
        finally:
            self._environment["BENCH_MAX_AGE"] = "600"
        (seconds,) = self._ask(
            "SELECT EXTRACT(EPOCH FROM percentile_disc(0.9) WITHIN GROUP (ORDER BY at)"
            " - percentile_disc(0.1) WITHIN GROUP (ORDER BY at)) FROM bench_effect"
        )
        rate = 0.8 * tasks / float(seconds)
        if not max_age:
            return {"alone": rate}
        found = {"rate": rate, "enqueue": enqueue}
        if first < tasks / 2:  # else the worker was done before it was looked at
            found["processor"] = 1000 * used / (tasks - first)
        return found

    def latency(self, count: int) -> dict[str, float]:
        """Return percentiles of the time from a call to its effect. Only one task runs
        at a time."""
        with self._worker():
            self._empty()
            self._project("enqueue", "1")
            self._wait_for(1, 60)
            self._empty()
            self._project("alone", str(count), "0.1")
            self._wait_for(count, 60)
        (found,) = self._ask(
            "SELECT array_agg(EXTRACT(EPOCH FROM e.at - c.at)) FROM bench_effect e "
            "JOIN bench_call c USING (task)"
        )
        waits = sorted(1000 * float(one) for one in found)
        return {
            "p50": statistics.median(waits),
            "p99": waits[min(len(waits) - 1, int(0.99 * len(waits)))],
        }

    def killed(self, count: int) -> Iterator[dict[str, float]]:
        """Kill the worker after a third of its tasks, start another one, and yield {}.
        When resumed, wait for the remaining tasks, and yield the number of tasks that
        did not run and the number of repeated runs."""
        self._empty()
        self._project("enqueue", str(count))
        with self._worker():
            self._wait_for(count // 3, 60)
        with self._worker():
            end = time.monotonic() + RECOVERY
            yield {}
            with contextlib.suppress(TimeoutError):
                self._wait_for(count, end - time.monotonic(), distinct=True)
        rows, tasks = self._ask(
            "SELECT count(*), count(DISTINCT task) FROM bench_effect"
        )
        yield {"lost": count - tasks, "doubled": rows - tasks}

    @contextlib.contextmanager
    def _worker(self) -> Iterator[psutil.Process]:
        """Run the worker while the block runs. At the end, kill it with all processes
        that it started."""
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
    """Return the processor time of a worker and its children, in seconds."""
    total = 0.0
    for one in [worker, *worker.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def versions(python: str) -> str:
    """Return the versions of this Python and of its installed packages."""
    names = [one.partition("[")[0] for one in ["django", *PEERS, *NEW_PEERS]]
    code = (
        "import sys; from importlib.metadata import distributions as all; "
        "found = {one.name.lower(): one.version for one in all()}; "
        f"names = [one for one in {names} if one in found]; "
        "print('Python ' + sys.version.split()[0], "
        "*(f'{one} {found[one]}' for one in names), sep=', ')"
    )
    return subprocess.check_output([python, "-c", code], text=True).strip()


def newest() -> str:
    """Return the newest installed Python that every backend supports."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for version in ("3.13", "3.12"):
        found = [shutil.which(f"python{version}")]
        found += map(str, pyenv.glob(f"versions/{version}.*/bin/python"))
        for python in filter(None, found):
            if not subprocess.run([python, "-c", ""], capture_output=True).returncode:
                return python
    return sys.executable


def environment(base: str) -> tuple[str, list[str]]:
    """Create a virtual environment with the Python `base`, this package and the other
    backends. Returns the environment's Python, and the backends for which `base` is too
    old."""
    code = (
        "import sys; print('%d.%d' % sys.version_info[:2], sys.version_info < (3, 12))"
    )
    version, old = subprocess.check_output([base, "-c", code], text=True).split()
    home = Path(tempfile.gettempdir()) / f"txmsg-bench-workers-{version}"
    python, ready = home / "bin" / "python", home / "ready"
    absent = NEW_PEERS if old == "True" else []
    if not ready.exists():
        subprocess.run([base, "-m", "venv", "--clear", str(home)], check=True)
        ours = f"{ROOT}[amqp,tasks]"
        peers = [*PEERS, *(one for one in NEW_PEERS if one not in absent)]
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q", "-e", ours, *peers], check=True
        )
        ready.touch()
    return str(python), absent


if __name__ == "__main__":
    sys.exit(main())
