"""Hooks that kill or suspend a web process once, at an exact step of a request.

The steps are numbered as in docs/explanation/http-outbox.md.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from django_txmsg import signals
from django_txmsg.brokers.database import DatabaseSession
from django_txmsg.brokers.stomp import StompSession
from django_txmsg.models.outbox import OutboxManager
from tests.faults import wait_until


def die_once(*_: Any, **__: Any) -> None:
    """Kill this process, unless an earlier call has killed a process."""
    try:
        os.close(os.open(os.environ["TXMSG_TEST_ONCE"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def before_the_control_message() -> None:
    """Die after the view, before the control message is sent (between steps 2 and
    3)."""
    from django_txmsg.http_outbox.session import OutboxSession

    announce = OutboxSession._announce

    def announce_or_die(session: OutboxSession) -> None:
        die_once()
        announce(session)

    OutboxSession._announce = announce_or_die


def before_the_commit() -> None:
    """Die after the control message is sent, before the commit (between steps 3 and
    4)."""
    signals.control_message_sent.connect(die_once, weak=False)


def after_the_commit() -> None:
    """Die after the commit, before the messages are dispatched (between steps 4 and
    5)."""
    from django_txmsg.sending.scope import Block

    Block._note_commit = die_once


def stand_still_before_the_commit() -> None:
    """Wait before the commit until the test lets the request continue (between steps 3
    and 4)."""
    permission = Path(os.environ["TXMSG_TEST_ONCE"] + ".go")

    def wait(**_: Any) -> None:
        wait_until(permission.exists, deadline=60)

    signals.control_message_sent.connect(wait, weak=False)


def before_the_send() -> None:
    """Die in step 5, after the rows are claimed and before the broker receives a
    message."""
    for session in (DatabaseSession, StompSession):
        _die_in(session, "send", lambda session, batch, **_: len(batch) > 1)


def before_the_mark() -> None:
    """Die in step 5, after the broker has stored all messages and before the rows are
    marked as dispatched."""
    _die_in(OutboxManager, "mark_dispatched", lambda *_: True)


def _die_in(owner: Any, method: str, when: Any) -> None:
    original = getattr(owner, method)

    def replacement(*args: Any, **options: Any) -> Any:
        if when(*args, **options):
            die_once()
        return original(*args, **options)

    setattr(owner, method, replacement)


def failing_commits() -> None:
    """Make the database refuse the commit (step 4) of every transaction that has stored
    a message."""
    commit = BaseDatabaseWrapper._commit

    def refuse(connection: Any) -> Any:
        from django.db import OperationalError

        if connection.run_on_commit and len(connection.run_on_commit) > 1:
            raise OperationalError("the server closed the connection unexpectedly")
        return commit(connection)

    BaseDatabaseWrapper._commit = refuse


def stopped_before_the_insert() -> None:
    """Suspend a process while its request joins a control group: before the request
    takes the group's lock. The test resumes the process later. The process then commits
    the request, and is killed directly after the commit."""
    _stop_a_joiner("_join", before=True)


def stopped_after_the_insert() -> None:
    """Suspend a process while its request joins a control group: after the request has
    inserted its rows, and before it checks whether the group's control message covers
    these rows. The test resumes the process later. The process then commits the
    request, and is killed directly after the commit."""
    _stop_a_joiner("_announce", before=True)


def stopped_before_the_commit() -> None:
    """Suspend a process while its request joins a control group: after the request has
    checked whether the group's control message covers the request's rows. The test
    resumes the process later. The process then commits the request, and is killed
    directly after the commit."""
    _stop_a_joiner("_announce", before=False)


def _stop_a_joiner(step: str, *, before: bool) -> None:
    from django_txmsg.http_outbox.session import OutboxSession
    from django_txmsg.sending.scope import Block

    join, announce = OutboxSession._join, OutboxSession._announce
    joined: set[object] = set()

    def join_or_stop(session: OutboxSession) -> Any:
        answer = join(session)
        group = session._group
        if group is not None and group.opened_at is not None:
            joined.update((group, session._block))
            if step == "_join":
                _stop_once()
        return answer

    def announce_and_stop(session: OutboxSession) -> None:
        joins = session._group in joined and step == "_announce"
        if joins and before:
            _stop_once()
        announce(session)
        if joins and not before:
            _stop_once()

    def die(block: Block) -> None:
        if block in joined:
            die_once()

    OutboxSession._join = join_or_stop
    OutboxSession._announce = announce_and_stop
    Block._note_commit = die


def _stop_once() -> None:
    """Suspend this process, unless another process was suspended before."""
    try:
        os.close(
            os.open(os.environ["TXMSG_TEST_ONCE"] + ".stopped", os.O_CREAT | os.O_EXCL)
        )
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGSTOP)
