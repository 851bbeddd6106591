"""A Redis server that keeps all confirmed writes even if it is killed."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

from .server import Server, free_port


class Redis(Server):
    """A Redis server whose append-only file is synced after each command."""

    name = "redis"
    debian_packages = "redis-server"

    def __init__(self) -> None:
        super().__init__()
        self.port = free_port()

    @classmethod
    def programs(cls) -> dict[str, Path | None]:
        found = shutil.which("redis-server")
        return {"redis-server": Path(found) if found else None}

    def url(self, database: int = 0) -> str:
        """Return the URL of one of the server's numbered databases."""
        return f"redis://127.0.0.1:{self.port}/{database}"

    def prepare(self) -> None:
        """Do nothing: all options are on the command line."""

    def launch(self) -> subprocess.Popen[bytes]:
        program = self.programs()["redis-server"]
        return self.spawn(
            [
                str(program),
                *("--bind", "127.0.0.1", "--port", str(self.port)),
                *("--dir", str(self.directory), "--save", ""),
                *("--appendonly", "yes", "--appendfsync", "always"),
            ]
        )

    def ready(self) -> bool:
        """Return whether the server has loaded its file and answers."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 2) as connection:
                connection.settimeout(5)
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False
