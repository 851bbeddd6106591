"""Distinguishes databases whose services have the same name and the same SECRET_KEY, so
that each process settles only the control messages of its own database.

For example, a copy of production's database with production's settings sends its
control messages to production's queue, and also receives messages from there. A process
must not settle the messages of the other database, because it cannot see that
database's rows.
"""

from __future__ import annotations

import datetime as dt
import enum
import time
from typing import Any

from django.db import DatabaseError, connections, transaction

from ..django_internals import settings_of
from ..models import DatabaseIdentity
from ..models.fields import query
from ..runtime import database_health

#: Seconds for which an identity is cached. After that, a restart or a failover is
#: noticed.
KNOWN = 10.0
#: How long after a restart messages with the previous identity may arrive: the senders'
#: caching time, and the difference of the clocks.
SLACK = dt.timedelta(seconds=60)

_MAY_ASK = "SELECT has_function_privilege('pg_control_system()', 'EXECUTE')"
#: All sessions of a server see the same start time. A copy of its files starts at
#: another time; so does a standby, whose value has the same part before the last "/".
_IDENTITY = """
    SELECT current_database() || '/' || oid || '@' || {system} || '/'
        || trunc(extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint
    FROM pg_database WHERE datname = current_database()
"""
_SYSTEM = "(SELECT system_identifier FROM pg_control_system())"

#: By the database's address: until when its identity is cached, and the identity.
_known: dict[tuple[str, ...], tuple[float, str]] = {}
#: Recorded identities, and since when.
_noted: dict[tuple[tuple[str, ...], str], dt.datetime] = {}


def current(using: str) -> str:
    """Return the database's identity; "" on SQLite, which has none."""
    until, identity = _known.get(_place(using), (0.0, ""))
    return identity if until > time.monotonic() else _ask(using)


def note(using: str) -> None:
    """Record the database's identity, and when it was first seen, for `is_ours()`. Call
    this outside a transaction. Raises database errors."""
    identity = current(using)
    if identity:
        _note(using, identity)


def is_ours(using: str, identity: str, sent_at: dt.datetime) -> bool:
    """Return whether a message with this identity was sent from this database. Call
    this outside a transaction. Raises database errors.

    An identity contains the time when the database server started. If only that time
    differs from the current identity, the message comes from this database before a
    restart or a failover, or from a copy of the database. The message then counts as
    ours if it was sent before the current identity was first seen.
    """
    if identity == current(using):
        return True
    mine = _ask(using)
    if not mine or identity == mine:
        return True
    place, system, start = _parts(identity)
    my_place, my_system, my_start = _parts(mine)
    # Left out for a user who may not query the system's identifier.
    if place != my_place or (system and my_system and system != my_system):
        return False
    return start == my_start or sent_at <= _note(using, mine) + SLACK


def _parts(identity: str) -> tuple[str, str, str]:
    """Return the three parts of an identity: the database, the identifier of the
    server's files, and the time when the server started."""
    files, _, start = identity.rpartition("/")
    place, _, system = files.rpartition("@")
    return place, system, start


def _ask(using: str) -> str:
    identity = ""
    if connections[using].vendor == "postgresql":
        ((may_ask,),) = query(using, _MAY_ASK)
        system = _SYSTEM if may_ask else "''"
        ((found,),) = query(using, _IDENTITY.format(system=system))
        identity = str(found)[-255:]
    _known[_place(using)] = time.monotonic() + KNOWN, identity
    return identity


def _note(using: str, identity: str) -> dt.datetime:
    """Record an identity, and return when the database was first seen with it. A
    standby, which accepts no writes, always raises an error here."""
    written = _place(using), identity
    if written not in _noted:
        rows = DatabaseIdentity.objects.using(using)
        with transaction.atomic(using=using):
            # `ignore_conflicts` would also ignore that a new primary key exists.
            rows.bulk_create(
                [DatabaseIdentity(identity=identity)],
                update_conflicts=True,
                update_fields=["identity"],
                unique_fields=["identity"],
            )
        _noted[written] = rows.get(identity=identity).seen_at
    return _noted[written]


def _place(using: str) -> tuple[str, ...]:
    settings = settings_of(connections[using])
    return tuple(str(settings.get(name, "")) for name in ("HOST", "PORT", "NAME"))


# Whether a transaction has committed, queried from another connection.
#
# PostgreSQL answers by the transaction's id, at once and for certain. On other
# databases the control message's receiver waits instead (`control_receive.py`).

#: PostgreSQL's status texts. NULL: the id is too old to be known.
_STATUS = "SELECT pg_xact_status(CAST(%s AS text)::xid8)"
_MARK = "SELECT CAST(pg_current_xact_id() AS text)"


class Verdict(enum.Enum):
    """The known state of a transaction."""

    IN_PROGRESS = "in progress"
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


def transaction_id(connection: Any) -> str:
    """Return the id of the open transaction. Savepoints do not change the id."""
    ((mark,),) = query(connection.alias, _MARK)
    return str(mark)


def ask(using: str, mark: str) -> Verdict:
    """Return the outcome of the transaction with this id.

    The outcome is UNKNOWN if the server has no record of the id: the id is very old, or
    the server is a standby that was promoted before the transaction reached it.
    """
    try:
        ((status,),) = query(using, _STATUS, [mark])
    except DatabaseError as error:
        if database_health.sqlstate(error) in _NOT_KNOWN:
            return Verdict.UNKNOWN
        raise
    return Verdict.UNKNOWN if status is None else Verdict(status)


#: invalid_parameter_value ("is in the future"), invalid_text_representation,
#: undefined_function and undefined_object (a server older than 13).
_NOT_KNOWN = frozenset({"22023", "22P02", "42883", "42704"})
