"""A Debian in a folder, beside this machine's own: newer servers, in the same tests.

`scripts/servers_of_today.sh` makes the folders. `TXMSG_TEST_RABBITMQ_ROOT=sid` starts
RabbitMQ from the folder of that name.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "servers_of_today.sh"


@dataclass(frozen=True)
class Root:
    """Where a server's programs are: a folder by its name, or "" for this machine."""

    name: str = ""

    @classmethod
    def of(cls, server: str) -> Root:
        """Return the one that the environment names for a server."""
        return cls(os.environ.get(f"TXMSG_TEST_{server.upper()}_ROOT", ""))

    @property
    def folder(self) -> Path:
        """Where its file system begins."""
        if not self.name:
            return Path("/")
        return _roots() / self.name

    def find(self, *patterns: str) -> Path | None:
        """Return a program as a process in there names it: the last file that fits."""
        for pattern in patterns:
            found = sorted(self.folder.glob(pattern.lstrip("/")), key=_version)
            if found:
                return Path("/") / found[-1].relative_to(self.folder)
        return None

    def which(self, name: str) -> Path | None:
        """Find a program on PATH, which Debian's folders for servers are added to."""
        if self.name:
            return self.find(f"usr/bin/{name}", f"usr/sbin/{name}")
        found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
        return Path(found) if found else None

    def command(
        self, command: list[str], user: str | None
    ) -> tuple[list[str], str | None]:
        """Return how a command is started in there, and as whom from out here."""
        if not self.name:
            return command, user
        as_user = ["-u", user] if user else []
        # Some have a HOME of their own.
        told = ["env", f"TXMSG_TEST_ROOTS={_roots()}"]
        return [*told, str(SCRIPT), "in", self.name, *as_user, *command], None

    def give(self, path: Path, user: str) -> None:
        """Make a user in there the owner of a file or directory."""
        entries = (self.folder / "etc/passwd").read_text().splitlines()
        (found,) = (entry for entry in entries if entry.startswith(f"{user}:"))
        _, _, uid, gid, *_ = found.split(":")
        os.chown(path, int(uid), int(gid))


def _roots() -> Path:
    """Return where the folders are."""
    given = os.environ.get("TXMSG_TEST_ROOTS") or "~/.cache/txmsg/roots"
    return Path(given).expanduser()


def _version(path: Path) -> list[tuple[int, str]]:
    """Sort 9 before 15."""
    return [(int(part) if part.isdigit() else 0, part) for part in path.parts]
