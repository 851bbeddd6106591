"""A forked process makes its own ids and objects, and belongs to no stage. The fork may
be Python's, or bypass Python's fork hooks, as in uWSGI."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import uuid
from collections.abc import Callable

import pytest

from django_txmsg.envelope.message import Message, new_id
from django_txmsg.jms.message import new_id as new_jms_id
from django_txmsg.runtime.liveness import now_running, running
from django_txmsg.runtime.per_process import PerProcess
from django_txmsg.sending.scope import Scope, current_scope, in_scope

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def fork_without_python() -> int:
    """Fork without Python's fork hooks, while this thread has the GIL.

    No other thread may wait for the GIL then. Otherwise the child would pass the GIL to
    that thread, which does not exist in the child, and would wait for ever.
    """
    interval, library = sys.getswitchinterval(), ctypes.PyDLL(None)
    sys.setswitchinterval(60)  # seconds until another thread asks for the lock
    select.select([], [], [], 0)  # let the threads run that have asked already
    try:
        return int(library.fork())
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("fork", [os.fork, fork_without_python])
@pytest.mark.parametrize("make", [new_id, new_jms_id])
def test_a_forked_process_makes_ids_of_its_own(
    fork: Callable[[], int], make: Callable[[], object]
) -> None:
    """Parent and child each make an id after a fork. Only the parts that contain the
    time may be equal."""
    reader, writer = os.pipe()
    child = fork()
    if child == 0:  # pragma: no cover - the other process
        signal.alarm(20)
        os.write(writer, str(make()).encode())
        os._exit(0)
    ours = uuid.UUID(str(make()))
    os.waitpid(child, 0)
    theirs = uuid.UUID(os.read(reader, 100).decode())
    os.close(reader)
    os.close(writer)

    assert theirs.version == ours.version
    assert theirs.bytes[-8:] != ours.bytes[-8:]


def test_a_process_that_a_handler_forks_is_in_no_stage() -> None:
    """A process forked in a handler does not belong to the handler's stage. Otherwise
    all forked processes would derive the same ids for different messages."""
    cause = Message(id=new_id(), destination="tests.q", body=None)
    scope = Scope(session_id=cause.id, cause=cause, stage="tests")
    with in_scope(scope), running("tests", cause.id, 1):
        child = os.fork()
        if child == 0:  # pragma: no cover - the other process
            os._exit(int(current_scope() is not None or bool(now_running())))
        _, status = os.waitpid(child, 0)
        assert current_scope() is not None
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_forked_process_starts_without_what_its_parent_has_made() -> None:
    """The process forks while its lock is held. The child starts without its parent's
    objects and with a new lock. With the parent's lock, the child would wait for
    ever."""
    made = PerProcess(lambda name: [name, os.getpid()])
    parents = made("a")
    with made._lock:
        child = os.fork()
        if child == 0:  # pragma: no cover - the other process
            signal.alarm(20)
            anew = not made.all() and made("a") == ["a", os.getpid()]
            os._exit(int(not anew))
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert made("a") is parents
    assert made.clear() == [parents]
    assert made("a") is not parents
