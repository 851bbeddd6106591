"""Fixtures shared by all tests: real servers, processes, and the selection of tests.

Servers start with the first test that uses them. If a server is not installed, its
tests are skipped; with `CI=true` they fail.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar
from zlib import crc32

import hypothesis
import pytest
from django.conf import settings
from django.db import connection
from pytest_django import DjangoDbBlocker

from tests import services
from tests.acceptance.wheel import fresh_python, wheel  # noqa: F401 - fixtures
from tests.faults import ManageProcess

hypothesis.settings.register_profile("tests", deadline=None, print_blob=True)
hypothesis.settings.load_profile("tests")

#: Asking for one of these means using Django's database.
DATABASE_FIXTURES = {"db", "transactional_db", "live_server", "admin_client"}
#: Asking for one of these, or naming it as a parameter, means using a server.
SERVER_FIXTURES = {*services.SERVERS, "chromium", "pgbouncer", "rabbitmq_amqp", "spark"}

#: What to choose the tests of a server by.
MARKED = {
    "activemq": {"activemq"},
    "browser": {"chromium"},
    "rabbitmq": {"rabbitmq", "rabbitmq_amqp"},
}

#: `make test` runs these folders on one database. The first two hardly use a database,
#: and run whole. The others hold the tests that kill; each runs every second time.
ON_SQLITE = {"docs", "unit"}
ON_POSTGRESQL = {"acceptance", "contract"}

#: All other tests that use a database take turns. Each test has one of four numbers.
#: The commit says whose turn it is: the tests of that number run on PostgreSQL, those
#: of the next number on SQLite, and the others not this time. The pipeline's tests,
#: which take longest, have one of eight numbers.
TURNS = 8
TURN = os.environ.get("TXMSG_TEST_TURN", "all")

S = TypeVar("S", bound=services.Server)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Mark the tests that use the database. Deselect the tests that run only on the
    database that is not in use, and with a turn those whose turn it is not."""
    engine = settings.DATABASES["default"]["ENGINE"]
    other = "sqlite" if "postgresql" in engine else "postgresql"
    chosen, left_out = [], []
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        used = (fixtures | _parameters(item)) & SERVER_FIXTURES
        if item.get_closest_marker("django_db") or fixtures & DATABASE_FIXTURES:
            item.add_marker("database")
        if used:
            item.add_marker("server")
        for marker, names in MARKED.items():
            if used & names:
                item.add_marker(marker)
        runs = not item.get_closest_marker(other) and has_its_turn(item, other)
        (chosen if runs else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen


def has_its_turn(item: pytest.Item, other: str, turn: str = TURN) -> bool:
    """Return True if a test is among those that this turn of `make test` runs on the
    database that is not `other`. Without a turn, every test is."""
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    if turn == "all" or folder in ON_SQLITE:
        return True
    number, wanted = crc32(item.nodeid.encode()), int(turn)
    on_sqlite = other == "postgresql"
    if folder == "spark":
        return number % TURNS == wanted % TURNS
    if not item.get_closest_marker("database"):
        return True
    if folder in ON_POSTGRESQL and not item.get_closest_marker("sqlite"):
        return not on_sqlite and number % 2 == wanted % 2
    return number % 4 == (wanted + on_sqlite) % 4


def _parameters(item: pytest.Item) -> set[str]:
    """Return the parameters of a test that are strings. Many of them name a fixture."""
    callspec = getattr(item, "callspec", None)
    values = callspec.params.values() if callspec else ()
    return {value for value in values if isinstance(value, str)}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Restart a server that an earlier test has killed."""
    for server in services.running_servers():
        server.start()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End the threads that the test's commits have started, so that they do not disturb
    the next test."""
    from django_txmsg.relaying.dispatcher import stop_dispatchers
    from django_txmsg.relaying.limits import pauses
    from django_txmsg.runtime import breaker

    stop_dispatchers(5.0)
    # What this process could not use is the test's own affair, too.
    pauses.clear()
    for one in breaker._breakers().all():
        one.worked()
        # An outage in the next test is a new one, however soon.
        one._pause = 0.0


def ask_for(kind: type[S]) -> S:
    """Return the shared server. If it is not installed, skip the test, or with
    `CI=true` fail it."""
    absent = kind.missing()
    if absent and os.environ.get("CI") == "true":
        pytest.fail(absent)
    if absent:
        pytest.skip(absent)
    return services.shared(kind)


# Not of the session's scope: pytest keeps a failed set-up for as long as the scope
# lasts, and the servers are shared anyway.


def _fixture(name: str, kind: type[services.Server]) -> object:
    @pytest.fixture(scope="module", name=name)
    def server() -> services.Server:
        return ask_for(kind)

    return server


globals().update(
    {name: _fixture(name, kind) for name, kind in services.SERVERS.items()}
)


@pytest.fixture(scope="module")
def rabbitmq_amqp(rabbitmq: services.RabbitMQ) -> services.ByAmqp:
    """The shared RabbitMQ server, used over AMQP."""
    return services.ByAmqp(rabbitmq)


@pytest.fixture(scope="module")
def pgbouncer(postgres: services.PostgreSQL) -> services.PgBouncer:
    """A real PgBouncer in transaction mode, in front of the server of `postgres`."""
    return ask_for(services.PgBouncer)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Iterator[object]:
    """Escape lone surrogates in a worker's reports, because a pipe cannot carry
    them."""
    data = yield
    return _sendable(data)


def _sendable(data: object) -> object:
    if isinstance(data, str):
        return data.encode(errors="backslashreplace").decode()
    if isinstance(data, dict):
        return {_sendable(key): _sendable(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(map(_sendable, data))
    return data


@pytest.fixture(scope="session")
def django_db_modify_db_settings_parallel_suffix() -> None:
    """Keep the names of the databases, also under pytest-xdist and tox. Processes that
    a test starts take the names from the settings. Each worker has its own server and
    files."""


@pytest.fixture(scope="session")
def django_db_setup(
    django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[None]:
    """Create the test databases.

    At the end, terminate the sessions of killed processes. Otherwise the server would
    refuse to drop the databases.
    """
    from tests.emptying import delete_where_little_is, keep_permissions

    delete_where_little_is()
    keep_permissions()
    yield
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )


@pytest.fixture
def destination() -> str:
    """A destination that no test has used before, because the brokers live longer than
    the tests."""
    return f"tests.{uuid.uuid4().hex}"


@pytest.fixture
def manage() -> Iterator[Callable[..., ManageProcess]]:
    """Return a function that starts `manage.py` processes, which end with the test."""
    with ExitStack() as stack:

        def start(*arguments: str, **options: object) -> ManageProcess:
            return stack.enter_context(ManageProcess(*arguments, **options))

        yield start
