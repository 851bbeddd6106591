"""A disk of a few megabytes, in memory, that a test can fill completely."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from .keeper import KEEPER


class SmallDisk:
    """A tmpfs of `megabytes`. Only root can mount it."""

    def __init__(self, megabytes: int) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="txmsg-disk-"))
        self._ballast = self.path / "ballast"
        KEEPER.remove(self.path)
        atexit.register(self.remove)
        size = ["-t", "tmpfs", "-o", f"size={megabytes}m,mode=0777", "tmpfs"]
        subprocess.run(["mount", *size, str(self.path)], check=True)

    @classmethod
    def missing(cls) -> str | None:
        """Return what is missing to mount a small disk, or None if nothing is
        missing."""
        if os.geteuid() == 0 and shutil.which("mount"):
            return None
        return "A small disk can be mounted by root alone: run these tests as root."

    def fill(self) -> None:
        """Fill the disk to its last byte."""
        with self._ballast.open("ab", buffering=0) as ballast:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        ballast.write(b"\0" * size)

    @property
    def is_full(self) -> bool:
        """Return True if the disk has no room for a file of one page."""
        probe = self.path / "probe"
        try:
            probe.write_bytes(b"\0" * 4096)
        except OSError as error:
            return error.errno == errno.ENOSPC
        finally:
            probe.unlink(missing_ok=True)
        return False

    def make_room(self) -> None:
        """Delete the file that fills the disk."""
        self._ballast.unlink()

    def remove(self) -> None:
        """Unmount the disk, even if it is in use."""
        if self.path.is_mount():
            subprocess.run(["umount", "--lazy", str(self.path)], check=False)
        shutil.rmtree(self.path, ignore_errors=True)
