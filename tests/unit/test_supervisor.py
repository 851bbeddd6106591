"""The supervisor of `--processes`, without child processes."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from django_txmsg.management.commands import _supervisor
from django_txmsg.management.commands._supervisor import Supervisor
from django_txmsg.runtime import liveness
from tests.faults import wait_until


def test_a_child_that_cannot_be_started_is_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    supervisor = Supervisor(1)
    (slot,) = supervisor.slots
    for pause in ("1", "2", "4"):
        slot.start_at = 0.0
        supervisor._look(slot)
        assert f"/nowhere/python'; next try in {pause} s" in caplog.text
    assert not supervisor.ready
    slot.failures, slot.start_at = 5_000, 0.0
    supervisor._look(slot)
    assert "next try in 30 s" in caplog.text


def test_parent_without_a_working_child_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    for name in ("FIRST_PAUSE", "INTERVAL"):
        monkeypatch.setattr(_supervisor, name, 0.01)
    monkeypatch.setattr(liveness, "_stop_requested", False)
    states: list[liveness.State] = []

    def watch() -> None:
        try:
            wait_until(lambda: caplog.text.count("next try") > 2)
            states.append(liveness.state())
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    supervisor, watcher = Supervisor(1), threading.Thread(target=watch)
    watcher.start()
    assert supervisor.run() == 0
    watcher.join()
    (state,) = states
    assert (state.loop, state.ready) == ("txmsg-supervisor", False)


def test_a_sigint_while_a_child_starts_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    popen = subprocess.Popen

    def interrupted(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE)

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    reading, writing = os.pipe()
    try:
        with _supervisor.signals_read([signal.SIGINT]) as signals:
            child = _supervisor.start(reading)
            assert signals.recv(10) == bytes([signal.SIGINT])
        # A terminal's Ctrl-C does not reach the child.
        assert child.communicate()[0].split() == [b"True"]
    finally:
        os.close(reading)
        os.close(writing)


def test_the_end_of_the_block_is_read_although_a_forked_process_lives() -> None:
    context = multiprocessing.get_context("fork")
    with _supervisor.signals_read([signal.SIGUSR1]) as reading:
        theirs = reading.dup()
        child = context.Process(target=signal.pause)
        child.start()
    try:
        with theirs:
            assert select.select([theirs], [], [], 10)[0] == [theirs]
            assert theirs.recv(1) == b""
    finally:
        child.kill()
        child.join()


#: Prints whether SIGINT is blocked in a process.
BLOCKED = """
import signal
print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
