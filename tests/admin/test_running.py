"""The page "Running now": messages in handlers, and stages without a worker."""

from __future__ import annotations

import datetime as dt
import html
import re
import uuid
from collections.abc import Callable

import pytest
from django.contrib.auth.models import User
from django.db.models import F
from django.test import Client

from django_txmsg.models import Worker
from django_txmsg.monitoring.presence import Presence
from django_txmsg.runtime import liveness
from tests import factories, running
from tests.app.models import Effect
from tests.faults import ManageProcess, wait_until

from .hooks import SLOW

PAGE = "/admin/django_txmsg/worker/running/"


def rows(client: Client, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading."""
    page = client.get(PAGE).content.decode()
    part = page.partition(f"<h2>{heading}")[2].partition("<h2>")[0]
    return [
        [
            " ".join(html.unescape(re.sub(r"<[^>]*>", "", cell)).split())
            for cell in re.findall(r"<td.*?>(.*?)</td>", row, re.DOTALL)
        ]
        for row in re.findall(r"<tr>(.*?)</tr>", part, re.DOTALL)
        if "<td" in row
    ]


def entry(message_id: uuid.UUID, **changed: object) -> dict[str, object]:
    """Return the entry that a heartbeat writes for one message."""
    return {
        "thread": "txmsg-orders.place-0",
        "stage": "orders.place",
        "message": str(message_id),
        "attempt": 3,
        "seconds": 90.5,
        **changed,
    }


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_running_handler_is_shown_until_it_ends(
    manage: Callable[..., ManageProcess],
) -> None:
    client = Client()
    client.force_login(User.objects.create_superuser("boss"))
    consumer = manage(
        "consume",
        hook="tests.admin.hooks.declare_a_slow_stage",
        txmsg={
            "REDELIVERY": {"INITIAL_DELAY": 0.01},
            "CONSUME": {"HEARTBEAT": 0.2},
            "DISPATCH_ON_COMMIT": "off",
        },
    )
    with running.txmsg():
        sent = running.send(SLOW, {})
        running.ship()
        [[since, stage, message, attempt, worker, thread]] = wait_until(
            lambda: rows(client, "Handlers"), message="a running handler"
        )

        assert since.endswith(" ago")
        assert (stage, message, attempt) == (SLOW, str(sent.id), "2")
        assert worker.endswith(f":{consumer.pid}")
        assert thread == f"txmsg-{SLOW}-0"

        Effect.objects.create(name="go", message_id="")
        wait_until(lambda: Effect.objects.filter(name="slow"), message="its end")
        wait_until(lambda: not rows(client, "Handlers"), message="the next heartbeat")
    assert "No handler was running" in client.get(PAGE).content.decode()


@pytest.mark.django_db
def test_what_a_killed_worker_was_running_is_shown_as_such(
    admin_client: Client,
) -> None:
    message_id = uuid.uuid4()
    factories.WorkerFactory(
        host="web-9", pid=99, stages=["lonely"], running=[entry(message_id)]
    )
    Worker.objects.update(heartbeat_at=F("heartbeat_at") - dt.timedelta(hours=1))

    [row] = rows(admin_client, "Handlers")

    # 90.5 seconds before the last heartbeat, an hour ago.
    assert row[0] in ("1 h 1 min ago", "1 h 2 min ago")
    assert row[1:4] == ["orders.place", str(message_id), "3"]
    assert row[4] == "web-9:99 silent"


@pytest.mark.django_db
def test_entries_of_other_code_are_left_out(admin_client: Client) -> None:
    """During a rolling deployment, another release writes entries that this release
    cannot read. The page leaves these entries out."""
    message_id = uuid.uuid4()
    strange = [
        entry(message_id, message="none"),
        entry(message_id, message=7),
        entry(message_id, seconds="long"),
        entry(message_id, seconds=1e300),
        entry(message_id, attempt=None),
        {},
        "text",
        None,
    ]
    factories.WorkerFactory(running=[*strange, entry(message_id)])

    assert len(rows(admin_client, "Handlers")) == 1


@pytest.mark.django_db
def test_stages_without_a_worker_are_shown(
    admin_client: Client, declared: Callable[..., None]
) -> None:
    declared("orphan.stage")

    page = admin_client.get(PAGE).content.decode()

    assert re.search(r"No live worker runs</strong>\s*<code>orphan.stage", page)


@pytest.mark.django_db
def test_the_page_needs_the_permission_to_see_workers(
    somebody: Callable[..., Client],
) -> None:
    message_id = uuid.uuid4()
    factories.WorkerFactory(running=[entry(message_id)])
    assert somebody("view_inboxmessage").get(PAGE).status_code == 403
    seen = somebody("view_worker").get(PAGE).content.decode()
    assert str(message_id) in seen
    # Its page would be refused.
    assert f"outboxmessage/{message_id}" not in seen


@pytest.mark.django_db
def test_a_handler_is_shown_once_if_a_relay_shares_its_process(
    admin_client: Client,
) -> None:
    with liveness.running("orders.place", uuid.uuid4(), 1):
        for kind in ("relay", "consumer"):
            Presence(kind, "default").beat(0)
    assert len(rows(admin_client, "Handlers")) == 1


def test_a_handler_that_raises_runs_no_more() -> None:
    def fail() -> None:
        with liveness.running("orders.place", uuid.uuid4(), 1):
            assert [one.stage for one in liveness.now_running()] == ["orders.place"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert liveness.now_running() == []
