"""Reads the results of test runs in build/results (tests/results.py).

    python scripts/what_ran.py           how each run ended, and its failures
    python scripts/what_ran.py --write   docs/tested.json, and the tables made of it

If these runs have not tested a version, its entry in docs/tested.json stays unchanged.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "results"
TESTED = ROOT / "docs" / "tested.json"
#: The table stands in these, between two comments.
PAGES = (ROOT / "README.md", ROOT / "docs" / "how-to" / "brokers.md")
TABLE = re.compile(r"(?<=<!-- tested -->\n).*?(?=<!-- end of tested -->)", re.DOTALL)
#: So many failures of a run are printed.
FAILURES = 20

#: The rows of the table, and the versions that should also work.
EXPECTED = {
    "RabbitMQ": "3.11 to 3.13, 4.1, 4.2",
    "ActiveMQ Classic": "5.18, 5.19, 6",
    "ActiveMQ Artemis": "its dialect is written from documentation",
    "PostgreSQL": "14, 16",
    "SQLite": "3.35 or newer",
    "Python with Django": "other pairs that Django supports",
    "PySpark": "4.0 to 4.3",
    "MySQL, Oracle": "no: not supported",
}
#: The row of a server, by the name that a run gives it.
ROWS = {
    "activemq": "ActiveMQ Classic",
    "postgresql": "PostgreSQL",
    "rabbitmq": "RabbitMQ",
    "sqlite": "SQLite",
}

Tested = dict[str, dict[str, dict[str, Any]]]


def main(arguments: list[str]) -> int:
    """Print the results, or write them with `--write`. Returns the exit code."""
    paths = sorted(RESULTS.glob("*.json"), key=lambda path: path.stat().st_mtime)
    runs = {path.stem: json.loads(path.read_text()) for path in paths}
    if not arguments:
        sys.stdout.write("".join(closing(name, run) for name, run in runs.items()))
    elif arguments == ["--write"]:
        known = [present(run, ROOT) for run in runs.values()]
        write(merged(json.loads(TESTED.read_text()), known))
    else:
        sys.stderr.write(str(__doc__))
        return 2
    return 0


def closing(name: str, run: dict[str, Any]) -> str:
    """Return a text about one run: its counts, its failures, and the tests that failed
    at first and then passed."""
    counts = Counter(outcome for outcome, *_ in run["tests"].values())
    ended = [f"{counts[one]} {one}" for one in ("passed", "failed", "skipped")]
    lines = [f"{name}: {', '.join(ended)}; exit code {run['exit']}"]
    lines += [f"  FAILED {failure}" for failure in run["failures"][:FAILURES]]
    if len(run["failures"]) > FAILURES:
        lines.append(f"  and {len(run['failures']) - FAILURES} more")
    lines += [f"  FAILED ONCE {failure}" for failure in run["failed_once"]]
    return "".join(f"{line}\n" for line in lines)


def present(run: dict[str, Any], checkout: Path) -> dict[str, Any]:
    """Return a run without the tests that the checkout does not contain, such as
    renamed tests."""
    return {
        **run,
        "tests": {
            test: ended for test, ended in run["tests"].items() if there(test, checkout)
        },
    }


def there(test: str, checkout: Path) -> bool:
    """Return True if the checkout contains a test: the test's file exists, and contains
    the name of the test's function or class."""
    file, _, name = test.partition("::")
    words = _words(checkout / file)
    # A module that could not be imported has no name in it.
    return bool(words) and (not name or re.split(r"::|\[", name)[0] in words)


@cache
def _words(file: Path) -> frozenset[str]:
    """Return all words in a file, or an empty set if the file does not exist."""
    return frozenset(re.findall(r"\w+", file.read_text()) if file.is_file() else ())


def merged(tested: Tested, runs: list[dict[str, Any]]) -> Tested:
    """Return the known results, updated with the results of these runs. If a test ran
    twice with the same version and database, the later result counts."""
    ended: dict[tuple[str, str], dict[tuple[str, str], str]] = defaultdict(dict)
    for run in runs:
        for test, (outcome, *used) in run["tests"].items():
            for place in places(run, test, used):
                ended[place][run["database"], test] = outcome
    for (row, version), outcomes in ended.items():
        counts = Counter(outcomes.values())
        tested.setdefault(row, {})[version] = {
            "passed": counts["passed"],
            "failed": counts["failed"],
            "day": dt.date.today().isoformat(),
        }
    return tested


def places(
    run: dict[str, Any], test: str, used: list[str]
) -> Iterator[tuple[str, str]]:
    """Yield the cells of the table in which this test is counted. A cell is the name of
    a row and a version."""
    yield "Python with Django", f"{run['python']} with {run['django']}"
    for server in used:
        # A worker that crashed has not recorded its servers' versions.
        if version := run["servers"].get(server):
            yield ROWS[server], version
    if test.startswith("tests/spark/"):
        yield "PySpark", run["pyspark"]


def write(tested: Tested) -> None:
    """Write the known results to their file, and update the tables in the pages."""
    TESTED.write_text(json.dumps(tested, indent=2, sort_keys=True) + "\n")
    for page in PAGES:
        page.write_text(TABLE.sub(lambda _: table(tested), page.read_text()))


def table(tested: Tested) -> str:
    """Return the table in Markdown."""
    lines = [
        "| | tested version: number of tests that passed | not tested, should work |",
        "|---|---|---|",
    ]
    for row, expected in EXPECTED.items():
        versions = tested.get(row, {})
        ran = [
            cell(version, versions[version]) for version in sorted(versions, key=order)
        ]
        lines.append(f"| {row} | {', '.join(ran) or 'not run'} | {expected} |")
    return "".join(f"{line}\n" for line in lines)


def cell(version: str, ended: dict[str, Any]) -> str:
    """Return the results of the tests on one version, as text."""
    failed = f", **{ended['failed']} failed**" if ended["failed"] else ""
    return f"{version}: {ended['passed']:,}{failed}"


def order(version: str) -> list[int]:
    """Return a sort key for a version, so that 3.9 comes before 3.10."""
    return [int(number) for number in re.findall(r"\d+", version)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
