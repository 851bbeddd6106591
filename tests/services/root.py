"""A directory with another Debian system, so that the tests can use its newer servers.

`scripts/servers_of_today.sh` creates such directories. `TXMSG_TEST_RABBITMQ_ROOT=sid`
starts RabbitMQ from the directory `sid`.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "servers_of_today.sh"


@dataclass(frozen=True)
class Root:
    """The root directory of a server's programs. `name` names the directory of a Debian
    system. It is "" for this machine's own system."""

    name: str = ""

    @classmethod
    def of(cls, server: str) -> Root:
        """Return the root that `TXMSG_TEST_<SERVER>_ROOT` names."""
        return cls(os.environ.get(f"TXMSG_TEST_{server.upper()}_ROOT", ""))

    @property
    def folder(self) -> Path:
        """Return the path of the root directory on this machine."""
        if not self.name:
            return Path("/")
        return _roots() / self.name

    def find(self, *patterns: str) -> Path | None:
        """Return the path of a program, as seen inside the root. If a pattern matches
        several versions, return the path of the newest one."""
        for pattern in patterns:
            found = sorted(self.folder.glob(pattern.lstrip("/")), key=_version)
            if found:
                return Path("/") / found[-1].relative_to(self.folder)
        return None

    def which(self, name: str) -> Path | None:
        """Return the path of a program on PATH or in Debian's directories for
        servers."""
        if self.name:
            return self.find(f"usr/bin/{name}", f"usr/sbin/{name}")
        found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
        return Path(found) if found else None

    def command(
        self, command: list[str], user: str | None
    ) -> tuple[list[str], str | None]:
        """Return the command that starts a program inside the root, and the user that
        must run it."""
        if not self.name:
            return command, user
        as_user = ["-u", user] if user else []
        # Some have a HOME of their own.
        told = ["env", f"TXMSG_TEST_ROOTS={_roots()}"]
        return [*told, str(SCRIPT), "in", self.name, *as_user, *command], None

    def give(self, path: Path, user: str) -> None:
        """Make `user` the owner of a file or directory. The ids of the user come from
        `etc/passwd` in the root directory."""
        entries = (self.folder / "etc/passwd").read_text().splitlines()
        (found,) = (entry for entry in entries if entry.startswith(f"{user}:"))
        _, _, uid, gid, *_ = found.split(":")
        os.chown(path, int(uid), int(gid))


def _roots() -> Path:
    """Return the directory that contains all roots."""
    given = os.environ.get("TXMSG_TEST_ROOTS") or "~/.cache/txmsg/roots"
    return Path(given).expanduser()


def _version(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that sorts version 9 before 15."""
    return [(int(part) if part.isdigit() else 0, part) for part in path.parts]
