"""Runs every benchmark, and prints one table of their ratios.

    python -m benchmarks [--only NAME,NAME] [--quick] [--write]

A row compares one of our figures with another figure. Both are measured alternately in
the same run. The row has the median, the lowest and the highest ratio of the rounds.
The figures mean nothing if the machine does other work. `--write` replaces the rows
that were measured. The other rows of the page stay, each with its day.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from . import stand

#: The page of the docs that keeps the table, and what is around it there.
PAGE = Path("docs/explanation/performance.md")
BEGIN = "<!-- the table: written by python -m benchmarks --write -->"
END = "<!-- the end of the table -->"
HEAD = [
    "| what | compared with | ratio | lowest to highest | goal | measured on |",
    "|---|---|---|---|---|---|",
]
#: The modules, with what they are asked, and with what `--quick` asks for.
RUNS: list[tuple[str, list[str], list[str]]] = [
    ("store", [], ["--rows", "500", "--rounds", "2"]),
    ("enqueue", [], ["--rows", "300", "--rounds", "2"]),
    ("relay", ["--peer", "--rounds", "7"], ["--messages", "1000", "--rounds", "2"]),
    ("relay", ["--apart", "--rounds", "7"], ["--messages", "1000", "--rounds", "2"]),
    ("relay", ["--broker", "rabbitmq"], []),
    ("amqp", [], ["--messages", "1000", "--rounds", "1"]),
    ("refused", [], ["--messages", "1000", "--rounds", "1"]),
    ("relay_big_table", [], ["--dispatched", "20000", "--pending", "43000",
        "--messages", "63000", "--delayed", "5000", "--parked", "5000"]),
    ("growth", [], ["--rows", "20000"]),
    ("consume", [], ["--messages", "300", "--rounds", "2"]),
    ("consume", ["--broker", "rabbitmq", "--peer"], []),
    ("counts", [], ["--messages", "1000", "--rounds", "1"]),
    ("poison", [], ["--good", "300", "--poison", "30", "--rounds", "2"]),
    ("pipeline_app", [], ["--messages", "2000", "--rounds", "2"]),
    ("ordered", [], ["--messages", "100", "--rounds", "1", "--followers", "5000"]),
    ("wakeups", [], ["--part", "commits", "--rounds", "1"]),
    ("typed", [], ["--messages", "300", "--rounds", "2"]),
    ("flows", [], ["--flows", "50", "--rounds", "1", "--sizes", "1"]),
    ("http_outbox", [], ["--seconds", "1", "--rounds", "2"]),
    ("http_outbox", ["--apart"], []),
    ("jms_send", [], ["--messages", "2000", "--rounds", "1"]),
    ("celery_outbox", [], ["--calls", "200", "--rounds", "2"]),
    ("workers", [], []),
    ("limits", [], ["--rounds", "1", "--messages", "200", "--many", "1000",
        "--seconds", "10"]),
]  # fmt: skip


def main() -> int:
    """Run the benchmarks one after the other, and print the table. Returns 1 if a
    benchmark failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="these modules, by commas")
    parser.add_argument("--quick", action="store_true", help="to see that they run")
    parser.add_argument("--write", action="store_true", help=f"the table into {PAGE}")
    given = parser.parse_args()
    wanted = set(filter(None, given.only.split(",")))
    failed = []
    with tempfile.NamedTemporaryFile("r") as rows:
        for module, full, quick in RUNS:
            if (wanted and module not in wanted) or (given.quick and not quick):
                continue
            options = quick if given.quick else full
            print(f"\n$ python -m benchmarks.{module} {' '.join(options)}", flush=True)
            command = [sys.executable, "-m", f"benchmarks.{module}", *options]
            result = subprocess.run(command, env={**os.environ, stand.ROWS: rows.name})
            if result.returncode:
                failed.append(module)
        found = [json.loads(line) for line in rows]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    written, _, after = rest.partition(END)
    known = read(written) if given.write else []
    lines = dict([*known, *table(found)]).values()
    page = "\n".join([*machine(), "", *HEAD, *lines])
    print(f"\n{page}")
    if given.write:
        PAGE.write_text(f"{before}{BEGIN}\n\n{page}\n\n{END}{after}")
    for module in failed:
        print(f"benchmarks.{module} failed", file=sys.stderr)
    return 1 if failed or not found else 0


def machine() -> Iterator[str]:
    """Yield lines that describe the machine, and the versions of the compared
    software."""
    about = Path("/proc/cpuinfo")
    model = ""
    if about.exists():
        names = [one for one in about.read_text().splitlines() if "model name" in one]
        model = names[0].partition(":")[2].strip() if names else ""
    yield (
        f"{os.cpu_count()} cores ({model or platform.machine()}), "
        f"{platform.system()} {platform.release().partition('-')[0]}, "
        f"Python {platform.python_version()}"
    )
    ours = ("django", "psycopg", "stomp.py", "amqp", "celery", "kombu", "pydantic")
    versions = []
    for name in (*ours, "django-tasks-db", "procrastinate"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    yield ", ".join([*versions, *stand.servers(), stand.PEER.replace("==", " ")])


def table(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the names of the two variants of each row, and the row as a line of a
    Markdown table."""
    today = dt.date.today()
    for row in rows:
        ratios = row["ratios"]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios[1:] else "one run"
        names = f"| {row['what']} | {row['against']} |"
        yield (
            names,
            f"{names} {statistics.median(ratios):.2f} "
            f"| {spread} | {row['goal'] or '-'} | {today} |",
        )


def read(written: str) -> Iterator[tuple[str, str]]:
    """Yield what `table()` yields, of the rows that a page has."""
    for line in written.splitlines():
        cells = line.split("|")
        if len(cells) == 8 and cells[6].strip()[:1].isdigit():
            yield "|".join(cells[:3]) + "|", line


if __name__ == "__main__":
    sys.exit(main())
