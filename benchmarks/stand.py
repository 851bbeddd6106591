"""Shared by all benchmarks: real servers, a Django project, and a table of ratios.

Absolute figures depend on the machine and on the time of day. So our code and a
competitor run alternately in the same run. Quote only the ratio of their medians.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

#: The environment variable that names the file for the table of all benchmarks.
ROWS = "TXMSG_BENCH_ROWS"
#: The nearest peer, run in an environment of its own.
PEER = "django-outbox-pattern==3.2.1"

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def postgresql(name: str = "bench") -> str:
    """Start a PostgreSQL server, and return the URL of an empty database."""
    from tests import services

    return services.shared(services.PostgreSQL).create_database(name)


def django(
    database_url: str,
    txmsg: Mapping[str, Any],
    apps: Sequence[str] = (),
    **more: Any,
) -> None:
    """Set up Django in this process with these settings and additional apps, and
    migrate the empty database."""
    import environ
    from django.conf import settings
    from django.core.management import call_command

    os.environ.setdefault("TXMSG_TEST_DIR", tempfile.mkdtemp(prefix="txmsg-bench-"))
    settings.configure(
        DATABASES={"default": environ.Env.db_url_config(database_url)},
        INSTALLED_APPS=[
            "django.contrib.contenttypes",
            "django.contrib.auth",
            "django_txmsg",
            "tests.app",
            *apps,
        ],
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        SECRET_KEY="bench",
        USE_TZ=True,
        # As a service would that writes its log to a file, not to this terminal.
        LOGGING={
            "version": 1,
            "disable_existing_loggers": False,
            "loggers": {"django_txmsg": {"level": "CRITICAL"}},
        },
        TXMSG=dict(txmsg),
        **more,
    )
    import django as framework

    framework.setup()
    from django_txmsg.management.commands._workers import stay_light

    stay_light()
    call_command("migrate", verbosity=0)


def peer(mode: str, broker_url: str, count: int) -> float:
    """Return how many messages django-outbox-pattern 3.2.1 sends per second. That
    package runs in a separate environment, which is created on demand."""
    home = Path(tempfile.gettempdir()) / "txmsg-bench-peer"
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q",
             PEER, "psycopg[binary]"],
            check=True,
        )  # fmt: skip
    environment = {
        **os.environ,
        "PEER_DATABASE": postgresql("peer"),
        "PEER_BROKER": broker_url,
        "PEER_COUNT": str(count),
    }
    result = subprocess.run(
        [str(python), str(Path(__file__).with_name("peer_side.py")), mode],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(result.stdout.split()[-1])


def servers() -> list[str]:
    """Return the names and versions of the servers. Only servers from Debian's packages
    are found."""
    names = ["activemq", "postgresql", "rabbitmq-server"]
    query = ["dpkg-query", "-W", "-f", "${Package} ${Version}\n", *names]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    except FileNotFoundError:
        return []


def turns(
    contenders: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Run all contenders in turn, `rounds` times. Returns the figures of each."""
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, run in contenders.items():
            figures[name].append(run())
            print(
                f"  round {number + 1}: {name}: {figures[name][-1]:,.0f}",
                file=sys.stderr,
                flush=True,
            )
    return figures


def set_apart(server: int) -> None:
    """Reserve one processor for a server process. This process, and the processes that
    it starts later, use the other processors. So the server runs as if it had its own
    machine."""
    own, *others = sorted(os.sched_getaffinity(0))
    for thread in os.listdir(f"/proc/{server}/task"):
        os.sched_setaffinity(int(thread), {own})
    os.sched_setaffinity(0, others)


def processor_time() -> Counter[str]:
    """Return the processor time that each program has used so far, and the idle time,
    in ticks. Linux only."""
    idle = Path("/proc/stat").read_text().split(maxsplit=6)[4:6]
    used = Counter({"idle": sum(map(int, idle))})
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            before, _, after = file.read_text().rpartition(")")
            # The kernel's threads change the rest of their names as they work.
            program = before.partition("(")[2].partition("/")[0]
            used[program] += sum(map(int, after.split()[11:13]))
    return used


def shares(before: Counter[str], after: Counter[str]) -> str:
    """Return a text with each program's share of the processor time between two
    measurements."""
    spent = {name: after[name] - before[name] for name in after}
    total = sum(spent.values()) or 1
    largest = sorted(spent.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {ticks / total:.0%}" for name, ticks in largest)


def table(
    title: str,
    figures: Mapping[str, Sequence[float]],
    against: str,
    unit: str = "messages/s",
    goals: Mapping[str, float] | None = None,
) -> None:
    """Print the median and the range of each contender, and its ratio to `against` in
    the same rounds. A goal is a minimum for a rate, and a maximum for a time."""
    base = figures[against]
    goals = goals or {}
    print(f"\n{title} ({unit}; median of {len(base)} runs)")
    print(f"{'':60} {'median':>10} {'min':>10} {'max':>10} {'ratio':>7} {'goal':>7}")
    for name, values in figures.items():
        ratios = [value / other for value, other in zip(values, base, strict=True)]
        less = not unit.endswith("/s")
        goal = f"{'≤' if less else '≥'} {goals[name]:g}" if name in goals else ""
        print(
            f"{name:60} {statistics.median(values):10,.1f} {min(values):10,.1f}"
            f" {max(values):10,.1f} {statistics.median(ratios):7.2f} {goal:>7}"
        )
        if name != against:
            note(f"{title}: {name}", against, ratios, goal)


def note(what: str, against: str, ratios: Sequence[float], goal: str = "") -> None:
    """If `python -m benchmarks` runs this benchmark, add a row to the table of all
    benchmarks."""
    file = os.environ.get(ROWS)
    if file:
        row = {
            "what": what,
            "against": against,
            "ratios": [*ratios],
            "goal": goal,
        }
        with Path(file).open("a") as rows:
            rows.write(json.dumps(row) + "\n")
