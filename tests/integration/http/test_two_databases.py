"""Two databases with one service's name, one SECRET_KEY and one broker.

For example, a staging system has production's settings, or a restored database runs
beside its original. Each of the two receives control messages of the other, because
they share a queue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connection
from django.utils import timezone

from django_txmsg import wire
from django_txmsg.http_outbox import (
    control_message,
    control_receive,
    database_identity,
)
from django_txmsg.models import DatabaseIdentity
from tests.acceptance.crash_play import Manage
from tests.faults import ManageProcess, wait_until
from tests.sampling import sample
from tests.services import ActiveMQ, PostgreSQL

from .server import SETTINGS, WebServer

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "other"]),
    pytest.mark.postgresql,
]


def outputs(*processes: ManageProcess) -> str:
    return "\n".join(one.output for one in processes)


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Clear the cached database identities, because each test empties their table."""
    notes = (database_identity._known, database_identity._noted)
    for known in notes:
        known.clear()
    yield
    for known in notes:
        known.clear()


@pytest.mark.parametrize(
    ("name", "other"), [*sample([("first", "second"), ("second", "first")])]
)
def test_each_database_gets_its_control_messages_though_the_other_takes_them_first(
    postgres: PostgreSQL,
    activemq: ActiveMQ,
    manage: Manage,
    destination: str,
    tmp_path: Path,
    name: str,
    other: str,
) -> None:
    """A web process dies after the commit, and no relay runs. So the web process's
    messages are dispatched only if a receiver with the same database gets the control
    message. First, a receiver with another database gets the control message, and
    returns it to the queue, which both receivers share."""
    own = connection.settings_dict
    here = f"postgres://{own['USER']}:{own['PASSWORD']}@{own['HOST']}:{own['PORT']}/"
    urls = {
        "first": here + str(own["NAME"]),
        "second": postgres.create_database(f"test_second_{uuid.uuid4().hex[:8]}"),
    }
    env = {
        name: {
            "DJANGO_SETTINGS_MODULE": SETTINGS,
            # The settings put it in front.
            "TXMSG_TEST_DATABASE_URL": url.replace("/test_", "/"),
        }
        for name, url in urls.items()
    }
    txmsg = {
        "SERVICE": destination,
        "BROKERS": {"default": {"URL": activemq.url()}},
        "RELAY": {"LEASE": 2},
    }
    manage("migrate", env=env["second"]).succeed()

    def pending(name: str) -> int:
        with psycopg.connect(urls[name]) as asked:
            found = asked.execute(
                "SELECT count(*) FROM django_txmsg_outboxmessage"
                " WHERE dispatched_at IS NULL"
            ).fetchone()
        assert found is not None
        return int(found[0])

    with contextlib.ExitStack() as stack:
        stranger = stack.enter_context(
            manage("consume", f"{destination}.orders", txmsg=txmsg, env=env[other])
        )
        stranger.wait_for_line("Consuming")
        web = stack.enter_context(
            WebServer(
                tmp_path,
                txmsg=txmsg,
                hook="tests.integration.http.kills.after_the_commit",
                env=env[name],
            )
        )
        web.post_and_die("order?number=1")
        line = stranger.wait_for_line("is from database")
        assert all(url.rpartition("/")[2] in line for url in urls.values())
        assert pending(name) > 0
        consumer = stack.enter_context(
            manage("consume", f"{destination}.orders", txmsg=txmsg, env=env[name])
        )
        wait_until(
            lambda: pending(name) == 0,
            deadline=60,
            message=partial(outputs, stranger, consumer),
        )


def test_a_control_message_of_another_database_goes_back_after_one_pause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "django_txmsg.control")
    given = str(uuid.uuid4()), uuid.uuid4(), "default", "delay"
    foreign = control_message.ControlMessage(*given, database="shop/1@2/3")
    asked = []
    for attempt in (1, 2):
        with pytest.raises(control_receive.LookAgain) as again:
            control_receive._hand_back(foreign, control_receive.Look(attempts=attempt))
        asked.append(again.value)
    first, second = asked
    # It is held for the first pause, and then returned at the second check.
    assert first.hold > 0
    assert second.hold <= first.after
    assert "the clock of the sender's host is wrong" in caplog.text

    late = timezone.now() - dt.timedelta(seconds=control_receive.FOREIGN_FOR + 1)
    old = dataclasses.replace(foreign, sent_at=late)
    outcome = control_receive._hand_back(old, control_receive.Look())
    assert outcome == "another_database"
    assert f"dropped a control message for session {old.session_id}" in caplog.text


def test_a_control_message_names_its_database_and_an_old_one_does_not() -> None:
    identity = database_identity.current("default")
    assert str(connection.settings_dict["NAME"]) in identity
    given = str(uuid.uuid4()), uuid.uuid4(), "default", "delay"
    new = control_message.ControlMessage(*given, database=identity).outgoing()
    assert new.headers[control_message.DATABASE] == identity
    assert control_message.DATABASE in json.loads(new.headers[control_message.SIGNED])
    old = control_message.ControlMessage(*given).outgoing()
    assert control_message.DATABASE not in old.headers
    assert wire.MESSAGE_ID in old.headers


def is_ours(identity: str, sent_at: Any) -> bool:
    return database_identity.is_ours("default", identity, sent_at)


def test_messages_sent_before_a_restart_are_ours_and_later_ones_a_copys() -> None:
    mine = database_identity.current("default")
    database_identity.note("default")
    seen_at = DatabaseIdentity.objects.get().seen_at
    another_start = mine.rpartition("/")[0] + "/1700000000000000"
    minute = dt.timedelta(minutes=1)

    assert is_ours(mine, seen_at + 60 * minute)
    # A restart or a failover, and senders who have not noticed it yet.
    assert is_ours(another_start, seen_at - 60 * minute)
    assert is_ours(another_start, seen_at + minute / 2)
    assert not is_ours(another_start, seen_at + 2 * minute)
    # Another database of the server; another server.
    assert not is_ours("shop/5" + mine[mine.index("@") :], seen_at - minute)
    assert not is_ours(mine[: mine.index("@")] + "@7/8", seen_at - minute)
    assert DatabaseIdentity.objects.count() == 1


@pytest.fixture
def role() -> Iterator[str]:
    """Create a database role with all rights on the tables, and return its name."""
    name = f"role_{uuid.uuid4().hex[:8]}"
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {name}")
        cursor.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {name}")
        cursor.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {name}")
    yield name
    with connection.cursor() as cursor:
        cursor.execute("RESET ROLE")
        cursor.execute("GRANT EXECUTE ON FUNCTION pg_control_system() TO PUBLIC")
        cursor.execute(f"DROP OWNED BY {name}")
        cursor.execute(f"DROP ROLE {name}")


def test_users_with_other_rights_know_one_database(role: str) -> None:
    """Only one of two roles may read the server's system identifier, so the two roles
    see different identities of the same database. A process accepts both identities,
    whichever role it has."""
    with connection.cursor() as cursor:
        known = database_identity.current("default")
        cursor.execute("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
        cursor.execute(f"SET ROLE {role}")
        database_identity._known.clear()
        hidden = database_identity.current("default")
        assert hidden != known
        now = dt.datetime.now(dt.timezone.utc) + dt.timedelta(hours=1)
        database_identity._known.clear()
        assert is_ours(known, now)
        cursor.execute("RESET ROLE")
        database_identity._known.clear()
        assert is_ours(hidden, now)
        assert not is_ours(hidden.rpartition("/")[0] + "/1700000000000000", now)
        assert not is_ours("shop/5" + hidden[hidden.rindex("@") :], now)
