"""A child: the same command again, in a process of its own.

It is ended by SIGTERM. It ends too when its parent is killed: a pipe between them
closes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping

#: Says to a child, by the number of a pipe's end, that it is one.
PIPE = "TXMSG_PARENT_PIPE"
# Taken out of the environment: what a handler starts is no child of our parent.
_pipe = os.environ.pop(PIPE, "")


def is_child() -> bool:
    """Return whether a parent watches over this process."""
    return bool(_pipe)


def start(pipe: int, environment: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
    """Start this process's command once more. `pipe` is the end to read from of a pipe
    that this process never writes to, `environment` is added to its own.

    Call it in the main thread.
    """
    # A terminal's Ctrl-C reaches both, and the child is to hear of it once, from its
    # parent. A group of its own would keep a debugger from the keyboard. What is
    # ignored here stays ignored in the child.
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
    """In the child: call `stop` when the parent has gone."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(int(_pipe), 1)
        stop()

    threading.Thread(target=wait, name="txmsg-parent", daemon=True).start()
