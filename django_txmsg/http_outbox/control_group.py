"""Step 3 for many requests at once: a control message that several sessions share.

A control group is an id for which one control message has been confirmed. The sessions
that store under it need none of their own, and wait for no receipt: the message is not
settled before the last of them has ended. That holds by PostgreSQL's locks and clock
(`group_lock.py`), and by no clock of a process: a session whose INSERT came too late,
however that came about, has a message sent again before it commits.

One that meets no open group stores under a new one, which its own message opens for
others. As long as there is traffic the next one is opened beside it.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from django.core.signals import setting_changed
from django.db import connections

from .. import conf
from ..django_internals import in_testcase
from ..envelope.message import new_id
from ..errors import BrokerError
from . import commit_status, control_group_lock, control_send, database_identity
from .control_connections import control_channel

log = logging.getLogger("django_txmsg.control")

#: Seconds for which sessions join a group at most: what is left of a killed process
#: takes its message's receiver that long at most to be sure of.
LONGEST = 60.0
#: Seconds before its end at which a group's successor is opened.
LEAD = 0.25
#: Seconds after a group's opening, beyond those in which sessions join it, within which
#: their rows may still be inserted without another message.
SPARE = 2.0


class Group:
    """One group, and when it can be joined. Of one database, in one process."""

    def __init__(self, groups: Groups) -> None:
        self.id = new_id()
        self.lock = control_group_lock.key(self.id)
        self._groups = groups
        self._window = min(conf.get().HTTP.CONTROL_GROUP, LONGEST)
        self._valid = dt.timedelta(seconds=self._window + SPARE)
        #: The database's clock before the message that opened it, once there is one.
        self.opened_at: dt.datetime | None = None
        #: Until when, by this process's clock, sessions join it.
        self.closes = 0.0

    def vouch(self, stored_at: dt.datetime) -> None:
        """Return when a confirmed control message looks after what was stored until
        then, by the database's clock. Raises BrokerError when there is none."""
        self._groups.note(stored_at)
        if self.opened_at is None:
            self.open(stored_at)
        elif stored_at > self.opened_at + self._valid:
            # Too late for the one there is. This one keeps the group open for nobody.
            self._announce(stored_at)

    def open(self, opened_at: dt.datetime) -> None:
        """Have a message for it confirmed, and let sessions join. May raise
        BrokerError."""
        attempted = time.monotonic()
        self._announce(opened_at)
        self.opened_at = opened_at
        self.closes = attempted + self._window + LEAD
        self._groups.offer(self)

    def _announce(self, opened_at: dt.datetime) -> None:
        control_send.send(
            control_send.control_message(
                self._groups.using,
                self.id,
                "group",
                joined_until=opened_at + self._valid,
                database=self._groups.database,
            )
        )


class Groups:
    """The groups of one database in this process."""

    def __init__(self, using: str) -> None:
        self.using = using
        #: Its identity, as a session's thread has asked for it: a group's own thread
        #: uses no database.
        self.database = ""
        self._lock = threading.Lock()
        self._open: Group | None = None
        self._newest: dt.datetime | None = None
        self._opening = False

    def current(self) -> Group:
        """Return the group to store under: the open one, or a new one."""
        with self._lock:
            group = self._open
        if group is not None and time.monotonic() < group.closes:
            return group
        return Group(self)

    def offer(self, group: Group) -> None:
        """Let sessions join this group, unless another one is open for longer."""
        with self._lock:
            if self._open is None or self._open.closes < group.closes:
                self._open = group

    def note(self, stored_at: dt.datetime) -> None:
        """Know the database's clock, and open the next group in time."""
        with self._lock:
            if self._newest is None or stored_at > self._newest:
                self._newest = stored_at
            group, now = self._open, time.monotonic()
            if group is None or self._opening or not 0 < group.closes - now < LEAD:
                return
            self._opening = True
        thread = threading.Thread(
            target=self._open_next, name="txmsg-control-group", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            # No thread to be had, or the process ends: a session opens the next one.
            self._opening = False
            log.info("no control group is opened on %r: %s", self.using, error)

    def _open_next(self) -> None:
        with self._lock:
            # Known anew with the next session: a clock that was ahead once would put
            # off the end of every group to come.
            newest, self._newest = self._newest, None
        assert newest is not None
        try:
            Group(self).open(newest)
        except BrokerError as error:
            log.info("no control group is open on %r: %s", self.using, error)
        finally:
            self._opening = False


_groups: dict[str, Groups] = {}
_lock = threading.Lock()


def find(using: str, metadata: Mapping[str, str]) -> Group | None:
    """Return the group for a session that is about to store, or None where it needs a
    control message of its own: only PostgreSQL can tell when a group is over, and only
    a session that says nothing about itself can share a message."""
    settings, connection = conf.get().HTTP, connections[using]
    if (
        not settings.CONTROL_GROUP
        or settings.CONTROL_MESSAGE == "off"
        or settings.CONTROL_MESSAGE_ORACLE != "auto"
        or metadata
        or not commit_status.can_tell(connection)
        or in_testcase(connection)
        or control_channel().broker.stored_in is not None
    ):
        return None
    with _lock:
        groups = _groups.setdefault(using, Groups(using))
    groups.database = database_identity.current(using)
    return groups.current()


def _settings_changed(*, setting: str, **_: Any) -> None:
    if setting in ("TXMSG", "DATABASES"):
        _groups.clear()


def _forked() -> None:
    # What is open is the parent's affair: it may end before us.
    global _lock
    _lock = threading.Lock()
    _groups.clear()


setting_changed.connect(_settings_changed, dispatch_uid="django_txmsg.group")
os.register_at_fork(after_in_child=_forked)
