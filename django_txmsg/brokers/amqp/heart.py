"""Heartbeats of sessions whose thread is busy elsewhere, in a handler, say.

One thread for each process. It uses a link only while no other thread does, so that no
heartbeat is written in the middle of a send, and reads nothing.
"""

from __future__ import annotations

import contextlib
import threading

from ...runtime.per_process import Members, PerProcess
from .link import Link


class _Heart:
    """The links of this process, and the thread that beats for them."""

    def __init__(self) -> None:
        self._links: Members[Link] = Members()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()

    def keep(self, link: Link) -> None:
        self._links.add(link)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="txmsg-amqp-heart", daemon=True
                )
                self._thread.start()
        self._changed.set()

    def _run(self) -> None:
        while True:
            self._changed.wait(self._beat())
            self._changed.clear()

    def _beat(self) -> float | None:
        """Send due heartbeats; return the seconds until the next may be due."""
        links = [one for one in self._links.all() if one.transport.connected]
        for link in links:
            if link.owned.acquire(blocking=False):
                try:
                    # The session itself detects a broken link.
                    with contextlib.suppress(OSError):
                        link.beat()
                finally:
                    link.owned.release()
        return min((one.heartbeat / 4 for one in links), default=None)


_heart = PerProcess(_Heart)


def keep(link: Link) -> None:
    """Send this link's heartbeats until it is closed or no longer referenced."""
    if link.heartbeat:
        _heart().keep(link)
