"""Heartbeats of sessions whose thread is busy elsewhere, in a handler, say.

One thread for each process. It uses a link only while no other thread does, so that no
heartbeat is written in the middle of a send, and reads nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref

from .link import Link

_links: weakref.WeakSet[Link] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None
_changed = threading.Event()


def keep(link: Link) -> None:
    """Send this link's heartbeats until it is closed or no longer referenced."""
    global _thread
    if not link.heartbeat:
        return
    with _lock:
        _links.add(link)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(
                target=_run, name="txmsg-amqp-heart", daemon=True
            )
            _thread.start()
    _changed.set()


def _run() -> None:
    while True:
        _changed.wait(_beat())
        _changed.clear()


def _beat() -> float | None:
    """Send due heartbeats; return the seconds until the next may be due."""
    with _lock:
        links = [one for one in _links if one.transport.connected]
    for link in links:
        if link.owned.acquire(blocking=False):
            try:
                # The session itself detects a broken link.
                with contextlib.suppress(OSError):
                    link.beat()
            finally:
                link.owned.release()
    return min((one.heartbeat / 4 for one in links), default=None)


def _forked() -> None:
    # The sockets and the thread belong to the parent.
    global _changed, _links, _lock, _thread
    _changed, _links = threading.Event(), weakref.WeakSet()
    _lock, _thread = threading.Lock(), None


os.register_at_fork(after_in_child=_forked)
