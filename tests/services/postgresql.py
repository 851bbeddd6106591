"""A separate PostgreSQL server for the tests."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psycopg
from psycopg import sql

from .server import Server, ServerFailedError, free_port

USER = "txmsg"
PASSWORD = "txmsg-secret"


class PostgreSQL(Server):
    """A PostgreSQL server on loopback. Committed data survives `kill()`."""

    name = "postgresql"
    debian_packages = "postgresql"
    stop_signal = signal.SIGINT  # "fast": connected clients do not hold it up

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.port = free_port()
        self.settings = {
            "fsync": os.environ.get("TXMSG_TEST_FSYNC", "on"),
            "listen_addresses": "127.0.0.1",
            "max_connections": "200",
            "port": str(self.port),
            "unix_socket_directories": "",
            **(settings or {}),
        }

    @classmethod
    def programs(cls) -> dict[str, Path | None]:
        return {name: cls._program(name) for name in ("initdb", "postgres")}

    @classmethod
    def _program(cls, name: str) -> Path | None:
        """Return the path of a program of the newest installed PostgreSQL."""
        root = cls.root()
        return root.find(f"usr/lib/postgresql/*/bin/{name}") or root.which(name)

    def prepare(self) -> None:
        password = self.directory / "password"
        password.write_text(PASSWORD)
        self._give(self.directory, password)
        done = self.run(
            [
                str(self._program("initdb")),
                f"--pgdata={self.directory / 'data'}",
                f"--username={USER}",
                f"--pwfile={password}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--locale=C.UTF-8",
                "--no-sync",
            ],
            user=_user(),
        )
        if done.returncode:
            raise ServerFailedError(f"initdb failed:\n{done.stdout}{done.stderr}")

    def _give(self, *paths: Path) -> None:
        """Make the server's user the owner of these files or directories."""
        user = _user()
        if user:
            for path in paths:
                self.root().give(path, user)

    def launch(self) -> subprocess.Popen[bytes]:
        options = [f"-c{name}={value}" for name, value in self.settings.items()]
        data = str(self.directory / "data")
        return self.spawn(
            [str(self._program("postgres")), "-D", data, *options], user=_user()
        )

    def ready(self) -> bool:
        try:
            with psycopg.connect(self.url("postgres"), connect_timeout=2) as connection:
                number = connection.info.server_version
                self.version = f"{number // 10000}.{number % 10000}"
                return True
        except psycopg.OperationalError:
            return False

    def url(self, database: str = "txmsg") -> str:
        """Return the URL of a database, which need not exist."""
        return f"postgres://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str) -> str:
        """Drop the database if it exists, create it again empty, and return its URL."""
        self.drop_database(name)
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
            )
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, even if clients are connected to it."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(
                    sql.Identifier(name)
                )
            )


class Standby(PostgreSQL):
    """A standby that follows another server until it is promoted."""

    def __init__(self, primary: PostgreSQL) -> None:
        super().__init__()
        self._primary = primary

    def prepare(self) -> None:
        self._give(self.directory)
        done = self.run(
            [
                *[str(self._program("pg_basebackup")), "--write-recovery-conf"],
                *["--checkpoint=fast", "--no-sync"],
                f"--pgdata={self.directory / 'data'}",
                f"--dbname=host=127.0.0.1 port={self._primary.port} user={USER}",
            ],
            env={"PGPASSWORD": PASSWORD},
            user=_user(),
        )
        if done.returncode:
            raise ServerFailedError(f"no copy: {done.stdout}{done.stderr}")

    def promote(self) -> None:
        """Stop following the primary, and accept writes."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute("SELECT pg_promote()")


def _user() -> str | None:
    """Return the user that runs PostgreSQL, which refuses to run as root."""
    return "postgres" if os.geteuid() == 0 else None
