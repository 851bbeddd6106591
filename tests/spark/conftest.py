"""One Spark session for all tests, and new databases with message logs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ask_for
from tests.services import PostgreSQL
from tests.services.postgresql import PASSWORD

pytest.importorskip("pyspark", reason="the pipeline needs django_txmsg[spark]")

from django_txmsg.spark.engine import installed
from django_txmsg.spark.spec import LakeSpec, SourceSpec

from .log import Log

ROOT = Path(__file__).resolve().parents[2]

#: Spark's settings for every JVM of the tests, those of their processes among them.
CONF = Path(__file__).parent / "conf"


def since_pyspark(*version: int) -> pytest.MarkDecorator:
    """Return a marker that skips a test if the installed PySpark is older than
    `version`."""
    needed = ".".join(map(str, version))
    return pytest.mark.skipif(
        installed() < version, reason=f"needs PySpark {needed}: told as an error"
    )


#: The sketches of latencies.
ANALYZES = installed() >= (4, 1, 2)
analyzes = since_pyspark(4, 1, 2)


def pytest_configure(config: pytest.Config) -> None:
    """Set Spark's settings, and ignore warnings that earlier PySpark releases cause.
    These releases leave sockets open after collecting rows, and use time zones that
    pandas deprecates."""
    os.environ["SPARK_CONF_DIR"] = str(CONF)
    if installed() < (4, 2):
        os.environ.setdefault("PYARROW_IGNORE_TIMEZONE", "1")
        config.addinivalue_line("filterwarnings", "ignore:unclosed:ResourceWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test more time, because a Spark job is slow on two cores. If a test
    timed out during a call into the JVM, no later test could use the session."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """The Spark session that all tests share."""
    from django_txmsg.spark import register
    from django_txmsg.spark.session import build

    warehouse = tmp_path_factory.mktemp("warehouse")
    # Spark's own processes know the environment that it was started in.
    os.environ["TXMSG_TESTS_PASSWORD"] = PASSWORD
    # A specification that is written down holds no password.
    os.environ["TXMSG_PASSWORD_SHOP"] = PASSWORD
    session = build(
        "tests",
        {
            "spark.master": "local[2]",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(warehouse),
            "spark.ui.showConsoleProgress": "false",
        },
    )
    register(session)
    yield session
    session.stop()


def migrate(url: str) -> None:
    """Create the package's tables in the database `test_<name>` of a URL."""
    subprocess.run(
        [sys.executable, "tests/manage.py", "migrate", "-v0", "--skip-checks"],
        cwd=ROOT,
        check=True,
        env=os.environ | {"TXMSG_TEST_DATABASE_URL": url},
    )


@pytest.fixture(scope="session")
def postgres_template() -> str:
    """A database with the package's tables, which tests copy."""
    postgres = ask_for(PostgreSQL)
    name = f"template_{uuid.uuid4().hex[:8]}"
    postgres.create_database(f"test_{name}")
    migrate(postgres.url(name))
    return f"test_{name}"


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an SQLite file with the package's tables, and return its path. Tests copy
    the file."""
    directory = tmp_path_factory.mktemp("sqlite")
    subprocess.run(
        [sys.executable, "tests/manage.py", "migrate", "-v0", "--skip-checks"],
        cwd=ROOT,
        check=True,
        env={
            **{k: v for k, v in os.environ.items() if k != "TXMSG_TEST_DATABASE_URL"},
            "TXMSG_TEST_DIR": str(directory),
        },
    )
    return directory / "default.sqlite3"


@pytest.fixture
def make_log(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[..., Log]]:
    """Return a function that creates an empty message log for a service, on SQLite or
    PostgreSQL."""
    made: list[Log] = []

    def make(vendor: str, service: str = "shop") -> Log:
        if vendor == "sqlite":
            path = tmp_path / f"{service}.sqlite3"
            shutil.copy(request.getfixturevalue("sqlite_template"), path)
            log = Log(SourceSpec(service, f"sqlite:///{path}"))
        else:
            server: PostgreSQL = request.getfixturevalue("postgres")
            template = request.getfixturevalue("postgres_template")
            name = f"log_{uuid.uuid4().hex[:12]}"
            with Log(SourceSpec("", server.url("postgres"))).connected() as connection:
                connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
            log = Log(SourceSpec(service, server.url(name)))
        made.append(log)
        return log

    yield make
    for log in made:
        log.drop()


#: Tests that commit in Django's database, where the pipeline keeps its record, too.
committing = pytest.mark.django_db(
    transaction=True,
    databases=["default", "other"],
    available_apps=["django_txmsg", "django_txmsg.spark", "tests.app"],
)

#: `log`, on each kind of database in `make test`, too.
everywhere = pytest.mark.parametrize("log", ["postgresql", "sqlite"], indirect=True)


@pytest.fixture(params=["postgresql", pytest.param("sqlite", marks=pytest.mark.matrix)])
def log(request: pytest.FixtureRequest, make_log: Callable[..., Log]) -> Log:
    """An empty message log, on each database in turn. `make test` uses only one
    database."""
    return make_log(request.param)


@pytest.fixture
def pg_log(make_log: Callable[..., Log]) -> Log:
    """An empty message log on PostgreSQL."""
    return make_log("postgresql")


@pytest.fixture
def lake(tmp_path: Path) -> LakeSpec:
    """The address of a lake in a new directory."""
    return LakeSpec(f"file://{tmp_path}/lake")
