"""Runs pytest with a PostgreSQL server of its own as the default database.

    python -m tests.on_postgresql tests/integration -k relay
    python -m tests.on_postgresql --pgbouncer tests/integration -k relay

The server lives in this process, so that the fixture `postgres` is the very server
the tests' rows are in, and killing it is a test like any other. `--pgbouncer` puts a
pooler in transaction mode before it.
"""

from __future__ import annotations

import os
import sys

import pytest

from . import services


def main(arguments: list[str]) -> int:
    """Run pytest; without PostgreSQL say what to install, and fail where `CI=true`."""
    pooled = "--pgbouncer" in arguments
    kind = services.PgBouncer if pooled else services.PostgreSQL
    absent = services.PostgreSQL.missing() or kind.missing()
    if absent:
        sys.stderr.write(f"Not run on PostgreSQL: {absent}\n")
        return 1 if os.environ.get("CI") == "true" else 0
    arguments = [argument for argument in arguments if argument != "--pgbouncer"]
    server = services.shared(kind)
    os.environ["TXMSG_TEST_DATABASE_URL"] = server.url()
    return pytest.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
