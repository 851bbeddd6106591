"""`--reload`: a parent watches the code, and restarts its child when it changes.

SIGTERM ends the child; if it does not end in time, it is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.apps import apps

from . import _child as child
from ._process import say

#: Seconds between two checks of the files.
INTERVAL = 0.5
#: Seconds that a child has to finish its messages.
GRACE = 10.0
_FOREIGN = ("site-packages", "dist-packages", "node_modules", "__pycache__")


class Reloader:
    """The parent: `run()` until a signal arrives."""

    def __init__(self, stderr: Any) -> None:
        self._stderr = stderr
        self._signals: list[int] = []
        self._awake = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._ending = False
        self._read, self._write = os.pipe()

    def run(self) -> int:
        """Return the exit code: the child's, once a signal has ended it."""
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            while not self._signals:
                seen = dict(files())
                self._start()
                self._watch(seen)
                if not self._signals:
                    self._end()
            return self._last()
        finally:
            if self._child is not None and self._child.poll() is None:
                self._child.kill()
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(self._read)
            os.close(self._write)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)
        # A second signal would abort the messages of a child that is already draining.
        if self._child is not None and (not self._ending or len(self._signals) > 1):
            self._child.send_signal(signal.SIGTERM)
        self._awake.set()

    def _start(self) -> None:
        self._ending = False
        self._child = child.start(self._read)
        if self._signals:
            self._child.terminate()

    def _watch(self, seen: dict[str, float]) -> None:
        """Return when a file has changed, or on a signal."""
        reported = False
        while not self._awake.wait(INTERVAL):
            assert self._child is not None
            if self._child.poll() is not None and not reported:
                reported = True
                self._say(
                    f"The process ended with {self._child.returncode}. The next change "
                    f"starts it again."
                )
            now = dict(files())
            if now != seen:
                changed = sorted(set(now.items()) ^ set(seen.items()))
                self._say(f"{changed[0][0]} changed: starting again.")
                return

    def _say(self, text: str) -> None:
        say(self._stderr, text)

    def _end(self) -> None:
        assert self._child is not None
        self._ending = True
        self._child.terminate()
        try:
            self._child.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._say(f"Killed: it has not ended within {GRACE:g} s.")
            self._child.kill()
            self._child.wait()

    def _last(self) -> int:
        assert self._child is not None
        code = self._child.wait()
        if code < 0 and len(self._signals) == 1:
            return 0  # it did not handle signals yet
        return 128 - code if code < 0 else code


def files() -> Iterator[tuple[str, float]]:
    """Return the project's own Python files, each with its modification time: those of
    its applications, of its settings, and other imported modules of the project."""
    found: set[str] = set()
    for root in _roots():
        for folder, folders, names in os.walk(root):
            folders[:] = [
                one for one in folders if one[0] != "." and one not in _FOREIGN
            ]
            found |= {f"{folder}/{name}" for name in names if name.endswith(".py")}
    found |= {
        file
        for module in list(sys.modules.values())
        if (file := str(getattr(module, "__file__", None))).endswith(".py")
        and _own(file)
    }
    for path in sorted(found):
        with contextlib.suppress(OSError):
            yield path, os.stat(path).st_mtime


def _roots() -> set[str]:
    roots = {config.path for config in apps.get_app_configs()}
    named = sys.modules.get(os.environ.get("DJANGO_SETTINGS_MODULE", ""))
    if named is not None and named.__file__:
        roots.add(str(Path(named.__file__).parent))
    return {root for root in roots if _own(root)}


def _own(path: str) -> bool:
    foreign = any(part in _FOREIGN for part in Path(path).parts)
    return not foreign and not path.startswith(str(Path(os.__file__).parent))
