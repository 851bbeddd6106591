"""Runs pytest with a new PostgreSQL server as the default database.

    python -m tests.on_postgresql tests/integration -k relay
    python -m tests.on_postgresql -n 3 tests/integration
    python -m tests.on_postgresql --pgbouncer tests/integration -k relay

The process that runs the tests starts the server. So the fixture `postgres` is the
server that has the tests' rows, and a test may kill it. Each worker of pytest-xdist
starts its own server. `--pgbouncer` puts a pooler in transaction mode in front of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from . import services


def main(arguments: list[str]) -> int:
    """Run pytest on PostgreSQL, and return the exit code. If a server is missing, do
    not run pytest: print what must be installed, and return 1 if the environment
    variable `CI` is "true", else 0."""
    kind = services.PgBouncer if "--pgbouncer" in arguments else services.PostgreSQL
    absent = services.PostgreSQL.missing() or kind.missing()
    if absent:
        sys.stderr.write(f"Not run on PostgreSQL: {absent}\n")
        return 1 if os.environ.get("CI") == "true" else 0
    return pytest.main(["-p", "tests.on_postgresql", *arguments])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--pgbouncer`."""
    parser.addoption("--pgbouncer", action="store_true", help="a pooler before it")


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Iterator[None]:
    """Start the server before Django reads its settings, in each process that runs
    tests."""
    given = early_config.known_args_namespace
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if is_worker or not getattr(given, "numprocesses", None):
        kind = services.PgBouncer if given.pgbouncer else services.PostgreSQL
        os.environ["TXMSG_TEST_DATABASE_URL"] = services.shared(kind).url()
    yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
