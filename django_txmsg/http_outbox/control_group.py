"""Step 3 for many requests together: a control message that several sessions share.

A control group is an id for which a control message has been confirmed. Sessions that
store their messages under this id need no control message of their own, and wait for no
receipt. The receiver settles the group's control message only after the last of these
sessions has ended. PostgreSQL's locks and clock ensure this order; the clocks of
processes do not matter. If a session's INSERT comes too late for the group, the session
sends another control message before it commits.

Each INSERT under a group first takes the group's lock in shared mode, and then reads
the clock, in one statement (`models/outbox_store.py`). PostgreSQL releases the lock at
the commit, when the rows become visible, or at the rollback of their transaction or
savepoint. So a receiver that gets the lock exclusively, after the time to join has
passed, knows that all rows are visible.

A session that finds no open group stores its messages under a new group, and its
control message opens that group for other sessions. While there is traffic, the next
group is opened in advance.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import logging
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from django.core.signals import setting_changed
from django.db import connections

from .. import conf
from ..django_internals import in_testcase
from ..envelope.message import new_id
from ..errors import BrokerError
from ..models.fields import query
from ..runtime.per_process import PerProcess
from ..runtime.thread_group import start_daemon
from . import control_message, database_identity
from .control_connection import control_channel

log = logging.getLogger("django_txmsg.control")

#: Seconds by which the database's clock may step back without harm.
MARGIN = 1.0

#: Checked in this order: a standby has its own locks, and a free lock means nothing
#: while sessions may still join.
_ASK = """
    SELECT CASE
      WHEN pg_is_in_recovery() THEN FALSE
      WHEN clock_timestamp() <= %s THEN FALSE
      ELSE pg_try_advisory_xact_lock(%s)
    END
"""


def has_ended(using: str, group: uuid.UUID, joined_until: dt.datetime) -> bool:
    """Return whether a group has ended. A group ends when no session can join it any
    more and all sessions that joined it have ended. Sessions could join it until
    `joined_until`. Call this function outside any transaction, so that the group's lock
    is released immediately. Query the group's rows only after this call."""
    bound = joined_until + dt.timedelta(seconds=MARGIN)
    ((over,),) = query(using, _ASK, [bound, lock_of(group)])
    return bool(over)


def lock_of(group: uuid.UUID) -> int:
    """Return the number of the group's lock."""
    digest = hashlib.sha256(b"txmsg-control-group\0" + group.bytes).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


#: Seconds before a group's end at which its successor is opened.
LEAD = 0.25
#: Seconds, after the time to join, within which rows may still be inserted without
#: another control message.
SPARE = 2.0


class Group:
    """A group of sessions of this process in one database, and the time until which
    sessions can join."""

    def __init__(self, groups: Groups) -> None:
        self.id = new_id()
        self.lock = lock_of(self.id)
        self._groups = groups
        self._window = conf.get().HTTP.CONTROL_GROUP
        self._valid = dt.timedelta(seconds=self._window + SPARE)
        #: The database's clock before the message that opened the group was sent; None
        #: before.
        self.opened_at: dt.datetime | None = None
        #: Until when sessions join it, by this process's clock.
        self.closes = 0.0

    def vouch(self, stored_at: dt.datetime) -> None:
        """Ensure that a confirmed control message covers the rows that were stored at
        `stored_at`, a time from the database's clock. If the group's message does not
        cover them, send another one. Raises BrokerError if the broker does not confirm
        the message."""
        self._groups.note(stored_at)
        if self.opened_at is None:
            self.open(stored_at)
        elif stored_at > self.opened_at + self._valid:
            # Too late for the existing message. This one opens the group for no other
            # session.
            self._announce(stored_at)

    def open(self, opened_at: dt.datetime) -> None:
        """Send the group's control message. When the broker has confirmed the message,
        make this the open group, which sessions can join. Raises BrokerError."""
        attempted = time.monotonic()
        self._announce(opened_at)
        self.opened_at = opened_at
        self.closes = attempted + self._window + LEAD
        self._groups.offer(self)

    def _announce(self, opened_at: dt.datetime) -> None:
        control_message.send(
            control_message.ControlMessage(
                str(new_id()),
                self.id,
                self._groups.using,
                "group",
                joined_until=opened_at + self._valid,
                database=self._groups.database,
            )
        )


class Groups:
    """The groups of one database in this process."""

    def __init__(self, using: str) -> None:
        self.using = using
        #: The database's identity, as queried by a session's thread: a group's own
        #: thread uses no database.
        self.database = ""
        self._lock = threading.Lock()
        self._open: Group | None = None
        self._newest: dt.datetime | None = None
        self._opening = False

    def current(self) -> Group:
        """Return the group for the next session: the open group, or a new one."""
        with self._lock:
            group = self._open
        if group is not None and time.monotonic() < group.closes:
            return group
        return Group(self)

    def offer(self, group: Group) -> None:
        """Make this the open group, which sessions join. Does nothing if the present
        open group closes later than this group."""
        with self._lock:
            if self._open is None or self._open.closes < group.closes:
                self._open = group

    def note(self, stored_at: dt.datetime) -> None:
        """Record `stored_at`, a time from the database's clock, if it is the latest so
        far. If the open group closes soon, open the next group in another thread."""
        with self._lock:
            if self._newest is None or stored_at > self._newest:
                self._newest = stored_at
            group, now = self._open, time.monotonic()
            if group is None or self._opening or not 0 < group.closes - now < LEAD:
                return
            self._opening = True
        try:
            start_daemon("txmsg-control-group", self._open_next)
        except RuntimeError as error:
            # No thread can be started, or the process is exiting: a session opens the
            # next group.
            self._opening = False
            log.info("no control group is opened on %r: %s", self.using, error)

    def _open_next(self) -> None:
        with self._lock:
            # Read again with the next session: otherwise a clock that was ahead once
            # would delay the end of every later group.
            newest, self._newest = self._newest, None
        assert newest is not None
        try:
            Group(self).open(newest)
        except BrokerError as error:
            log.info("no control group is open on %r: %s", self.using, error)
        finally:
            self._opening = False


#: The open groups of this process: a parent may end before its child.
_groups = PerProcess(Groups)


def find(using: str, metadata: Mapping[str, str]) -> Group | None:
    """Return the group for a session that is about to store messages, or None if the
    session needs its own control message. Groups need PostgreSQL, and only sessions
    without metadata can share a control message."""
    settings, connection = conf.get().HTTP, connections[using]
    if (
        not settings.CONTROL_GROUP
        or settings.CONTROL_MESSAGE == "off"
        or settings.CONTROL_MESSAGE_ORACLE != "auto"
        or metadata
        or connection.vendor != "postgresql"
        or in_testcase(connection)
        or control_channel().broker.stored_in is not None
    ):
        return None
    groups = _groups(using)
    groups.database = database_identity.current(using)
    return groups.current()


def _settings_changed(*, setting: str, **_: Any) -> None:
    if setting in ("TXMSG", "DATABASES"):
        _groups.clear()


setting_changed.connect(_settings_changed, dispatch_uid="django_txmsg.group")
