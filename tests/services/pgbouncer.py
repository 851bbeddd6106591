"""PgBouncer in transaction mode, in front of a PostgreSQL server of the tests.

Two transactions of one client may run in two sessions of the server, and one session
runs the transactions of many clients. So tests fail if the package relies on the state
of a session: a setting, a prepared statement or an advisory lock.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import psycopg

from .postgresql import PASSWORD, USER, PostgreSQL
from .server import Server, free_port

CONFIGURATION = """\
[databases]
* = host=127.0.0.1 port={target}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = {users}
pool_mode = transaction
default_pool_size = {pool}
server_round_robin = 1
max_client_conn = 300
server_login_retry = 1
"""


class PgBouncer(Server):
    """A pooler that lets many clients share a small number of PostgreSQL
    connections."""

    name = "pgbouncer"
    debian_packages = "pgbouncer"

    def __init__(self, postgresql: PostgreSQL, pool: int = 6) -> None:
        super().__init__()
        self.port = free_port()
        self._target, self._pool = postgresql.port, pool

    @classmethod
    def programs(cls) -> dict[str, Path | None]:
        # Debian's place is not on everybody's PATH.
        found = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
        return {"pgbouncer": Path(found) if found else None}

    def prepare(self) -> None:
        users = self.directory / "users.txt"
        users.write_text(f'"{USER}" "{PASSWORD}"\n')
        configuration = self.directory / "pgbouncer.ini"
        configuration.write_text(
            CONFIGURATION.format(
                target=self._target, port=self.port, users=users, pool=self._pool
            )
        )
        if _user():
            for path in (self.directory, users, configuration):
                shutil.chown(path, _user(), _user())

    def launch(self) -> subprocess.Popen[bytes]:
        program = self.programs()["pgbouncer"]
        configuration = str(self.directory / "pgbouncer.ini")
        return self.spawn([str(program), configuration], user=_user())

    def stop(self) -> None:
        """Stop PgBouncer immediately, without waiting for clients.

        From version 1.23 on, SIGQUIT does this. Earlier versions ignore SIGQUIT, and
        stop immediately on SIGTERM. So both signals are sent.
        """
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)
        super().stop()

    def ready(self) -> bool:
        url = f"postgres://{USER}:{PASSWORD}@127.0.0.1:{self.port}/postgres"
        try:
            psycopg.connect(url, connect_timeout=2, prepare_threshold=None).close()
        except psycopg.OperationalError:
            return False
        return True

    def url(self, database: str = "txmsg") -> str:
        """Return the URL of a database, with the options that Django needs behind a
        pooler."""
        return (
            f"postgres://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{database}"
            "?DISABLE_SERVER_SIDE_CURSORS=true"
        )


def _user() -> str | None:
    """Return the user that runs PgBouncer, which refuses to run as root."""
    return "postgres" if os.geteuid() == 0 else None
