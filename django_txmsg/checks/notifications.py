"""Whether this process receives notifications, tested with one of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from django.core.checks import CheckMessage, Warning
from django.db import Error as AnyDatabaseError
from django.db import connections

from .. import conf
from ..django_internals import in_block
from ..monitoring import databases
from ..relaying.listener import alias_of, receives_notifications


def check(aliases: Sequence[str]) -> Iterator[CheckMessage]:
    """Warn of databases in which a notification does not arrive."""
    for using in databases.with_tables():
        if using not in aliases or connections[using].vendor != "postgresql":
            continue
        connection = connections[alias_of(using)]
        if not conf.get().NOTIFY or in_block(connection):
            continue
        try:
            received = receives_notifications(using)
        except AnyDatabaseError:
            continue  # Django's own checks say that
        finally:
            connection.close()
        if received is False:
            yield Warning(
                f"A notification did not arrive in database {alias_of(using)!r}: "
                "relays and consumers learn of new messages by polling alone.",
                hint="Behind a pooler in transaction mode, name an alias that "
                'connects directly to the server in TXMSG["LISTEN_DATABASE"]; or set '
                'TXMSG["NOTIFY"] = False.',
                id="txmsg.W030",
            )
