"""What a long-running command is to the operating system: signals and a heartbeat."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from django.db import connections

from ... import conf
from ...worker import Presence


class Busy(Protocol):
    """Anything that knows how many messages it has in hand."""

    @property
    def in_flight(self) -> int: ...


@contextmanager
def stop_on_signals(stop: Callable[[], None], stderr: Any) -> Iterator[None]:
    """Call `stop` on the first SIGTERM or SIGINT; end the process on the second."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = False

    def handle(number: int, frame: object) -> None:
        nonlocal seen
        if seen:
            os._exit(128 + number)
        seen = True
        stderr.write("Stopping: finishing what is in hand. Again to stop at once.")
        stop()

    before = {
        number: signal.signal(number, handle)
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stay_light() -> None:
    """Spare the garbage collector what is loaded by now and stays for good: a third of
    the time that a busy relay spends on a message goes into walking over it."""
    gc.collect()
    gc.freeze()


@contextmanager
def heartbeat(presence: Presence, busy: Busy) -> Iterator[None]:
    """Tell that the process lives for as long as the block runs."""
    done = threading.Event()

    def beat() -> None:
        while True:
            presence.beat(busy.in_flight)
            if done.wait(conf.get().CONSUME.HEARTBEAT):
                break
        presence.leave()
        connections.close_all()

    thread = threading.Thread(target=beat, name="txmsg-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(5.0)
