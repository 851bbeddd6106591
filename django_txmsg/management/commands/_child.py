"""A child process: the same command again.

SIGTERM ends it. It also ends when its parent is killed, which closes a pipe between
them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

#: Tells a child that it is one; the value is the number of a pipe's end.
PIPE = "TXMSG_PARENT_PIPE"
# Removed from the environment: processes that a handler starts are not children of our
# parent.
_pipe = os.environ.pop(PIPE, "")


def is_child() -> bool:
    """Return whether a parent supervises this process."""
    return bool(_pipe)


def start(pipe: int, environment: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
    """Start this process's command once more. `pipe` is the read end of a pipe to which
    this process never writes; `environment` is added to its own.

    Call it in the main thread.
    """
    # A terminal's Ctrl-C reaches both, and the child must get it only once, from its
    # parent. A process group of its own would keep a debugger from the keyboard. A
    # signal ignored here stays ignored in the child.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return subprocess.Popen(  # noqa: S603 - what we were started with
            [sys.executable, *sys.orig_argv[1:]],
            env={**os.environ, **environment, PIPE: str(pipe)},
            pass_fds=(pipe,),
        )
    finally:
        signal.signal(signal.SIGINT, before)


def end_with_parent(stop: Callable[[], None]) -> None:
    """In the child: call `stop` when the parent has ended."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(int(_pipe), 1)
        stop()

    threading.Thread(target=wait, name="txmsg-parent", daemon=True).start()
