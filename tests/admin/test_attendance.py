"""The admin's pages, the terminal and the health check show which processes are live
and which are missing."""

from __future__ import annotations

import datetime as dt
import html
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections
from django.test import Client
from django.utils import timezone

from django_txmsg import signals, tasks
from django_txmsg.models import AuditEntry, Worker
from django_txmsg.models.worker import silent_after
from django_txmsg.monitoring import alarms, status
from django_txmsg.monitoring.presence import Presence
from tests import factories
from tests.faults import wait_until
from tests.running import txmsg

URL = "/admin/django_txmsg/"
HEALTH = "/txmsg/health/"


def told(*arguments: str) -> tuple[str, int]:
    """Return the output of message_status, and its exit code."""
    out = io.StringIO()
    try:
        call_command("message_status", *arguments, stdout=out)
    except SystemExit as ended:
        return out.getvalue(), int(ended.code or 0)
    return out.getvalue(), 0


def test_status_without_live_processes_is_not_well(
    viewer: Client, declared: Callable[..., None]
) -> None:
    declared("orders.place", "mail.send")

    page = viewer.get(URL).content.decode()

    assert "All is well." not in page
    assert "No consumer is running." in page
    assert "No relay is running." in page
    text, code = told()
    assert "No consumer is running. No stage is processed" in text
    assert ("All is well." in text, code) == (False, 0)
    assert viewer.get(HEALTH).json() == {
        "status": "degraded",
        "oldest": {"outbox": 0.0, "redelivery": 0.0, "queue": 0.0, "deadline": 0.0},
        "workers": {"relay": 0, "consumer": 0},
    }
    assert viewer.get(HEALTH, {"fail": "degraded"}).status_code == 503


@pytest.mark.parametrize(
    ("mode", "consequence", "code"),
    [("thread", "Messages are sent right after", 0), ("off", "No message is sent", 1)],
)
@pytest.mark.django_db(databases=["default", "other"])
def test_without_a_relay_the_alarm_says_what_is_sent(
    mode: str, consequence: str, code: int
) -> None:
    with txmsg(DISPATCH_ON_COMMIT=mode):
        text, exit_code = told("--fail-on", "bad")

    assert f"No relay is running. {consequence}" in text
    assert exit_code == code


def test_with_all_workers_running_status_is_ok(
    viewer: Client, declared: Callable[..., None]
) -> None:
    declared("orders.place", "mail.send")
    factories.WorkerFactory(kind="relay", stages=[])
    factories.WorkerFactory(stages=["orders.place"])

    page = viewer.get(URL).content.decode()
    assert "No consumer runs stage mail.send" in page
    assert viewer.get(HEALTH).json()["status"] == "degraded"
    assert status.read().stages["mail.send"].workers == 0
    factories.WorkerFactory(stages=["mail.send"])

    assert "All is well." in viewer.get(URL).content.decode()
    assert told()[0].endswith("All is well.\n")
    assert viewer.get(HEALTH).json()["status"] == "ok"
    metrics = viewer.get("/txmsg/metrics/").content.decode()
    assert 'txmsg_workers{kind="consumer",service="tests"} 2.0' in metrics
    series = 'txmsg_stage_workers{database="default",stage="mail.send"}'
    assert f"{series} 1.0" in metrics


def test_metrics_and_health_count_no_workers_of_other_services(viewer: Client) -> None:
    factories.WorkerFactory(kind="relay", service="billing", stages=[])
    factories.WorkerFactory(service="tests")

    metrics = viewer.get("/txmsg/metrics/").content.decode()

    assert 'txmsg_workers{kind="relay",service="tests"} 0.0' in metrics
    assert 'txmsg_workers{kind="consumer",service="tests"} 1.0' in metrics
    assert "billing" not in metrics
    assert viewer.get(HEALTH).json()["workers"] == {"relay": 0, "consumer": 1}


def test_silent_worker_does_not_count_as_live(
    viewer: Client, declared: Callable[..., None]
) -> None:
    declared("orders.place")
    factories.WorkerFactory(kind="relay", stages=[])
    killed = factories.WorkerFactory(heartbeat_at=factories.ago(minutes=3))

    page = viewer.get(URL).content.decode()
    assert "No consumer is running." in page
    assert f"process {killed.pid}) is silent" in page
    assert viewer.get(HEALTH).json()["workers"] == {"relay": 1, "consumer": 0}

    # One like it was there all the time: it may be stuck.
    older = factories.WorkerFactory(stages=["orders.place", "more"])
    assert "is silent" in viewer.get(URL).content.decode()
    # The killed one has been started again.
    Worker.objects.filter(pk=older.pk).update(started_at=factories.ago(minutes=2))
    assert "All is well." in viewer.get(URL).content.decode()


@pytest.mark.parametrize(
    ("age", "heartbeat", "lives"),
    [
        *[(20, 5, True), (40, 5, False), (120, 60, True), (200, 60, False)],
        *[(-20, 5, True), (-400, 5, False)],  # the clock was set back
    ],
)
def test_a_worker_lives_by_its_own_heartbeat_on_every_page(
    viewer: Client,
    declared: Callable[..., None],
    age: int,
    heartbeat: int,
    lives: bool,
) -> None:
    declared("orders.place")
    factories.WorkerFactory(kind="relay", stages=[])
    factories.WorkerFactory(
        heartbeat_at=factories.ago(seconds=age), silent_after=silent_after(heartbeat)
    )

    assert status.read().attendance.consumed is lives
    assert viewer.get(HEALTH).json()["workers"]["consumer"] == int(lives)
    assert ("All is well." in viewer.get(URL).content.decode()) is lives
    workers = viewer.get(URL + "worker/").content.decode()
    assert ("silent" in workers) is not lives


def test_a_worker_lives_by_the_databases_clock(
    viewer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    factories.WorkerFactory()
    ahead = timezone.now() + dt.timedelta(hours=1)
    monkeypatch.setattr(timezone, "now", lambda: ahead)
    workers = viewer.get(URL + "worker/").content.decode()
    assert "alive" in workers
    assert "silent" not in workers
    assert ">1 h</time>" not in workers


@pytest.mark.django_db
def test_heartbeat_row_says_when_the_worker_counts_as_dead() -> None:
    with txmsg(CONSUME={"HEARTBEAT": 60}):
        Presence("relay", "default").beat(0)
    assert Worker.objects.get().silent_after == dt.timedelta(seconds=195)


def test_a_paused_stage_is_a_notice_and_no_alarm(
    viewer: Client, declared: Callable[..., None]
) -> None:
    declared("reports.nightly")
    factories.WorkerFactory(kind="relay", stages=[])
    factories.WorkerFactory(stages=["reports.nightly"])
    factories.StageStateFactory(stage="reports.nightly", paused_by="linus")
    late = factories.ago(minutes=45)
    for _ in range(3):
        factories.InboxMessageFactory(stage="reports.nightly", parked=True, due_at=late)
    factories.QueueMessageFactory(queue="reports.nightly", available_at=late)

    page = viewer.get(URL).content.decode()

    assert "Stage reports.nightly is paused.</a> By linus, " in page
    assert "3 redeliveries wait." in page
    assert "overdue</a>" not in page
    assert "txmsg-banner txmsg-warn" in page
    text, code = told()
    assert (code, "are overdue" in text) == (0, False)
    assert "Stage reports.nightly is paused. By linus" in text
    facts = json.loads(told("--json")[0])
    assert facts["redelivering"]["count"] == 3
    answer = viewer.get(HEALTH, {"fail": "late"})
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    overdue = viewer.get(f"{URL}inboxmessage/?state=overdue")
    assert not overdue.context["cl"].result_list

    # The redeliveries of another stage are still overdue.
    factories.InboxMessageFactory(stage="mail.send", parked=True, due_at=late)
    assert "1 redelivery is overdue" in viewer.get(URL).content.decode()
    assert told()[1] == 1
    assert viewer.get(HEALTH).status_code == 503


def test_an_overdue_stage_that_is_gone_is_named(
    db: None, declared: Callable[..., None]
) -> None:
    declared("mail.send")
    factories.WorkerFactory(stages=["orders.place"])
    late = factories.ago(minutes=45)
    for stage in ("mail.send", "mail.renamed", "orders.place"):
        factories.InboxMessageFactory(stage=stage, parked=True, due_at=late)
    text = told()[0]
    assert "3 redeliveries are overdue" in text
    assert "No stage here is called mail.renamed." in text


def test_unconsumed_destination_is_named(
    viewer: Client, declared: Callable[..., None]
) -> None:
    declared("orders.place")
    factories.WorkerFactory(kind="relay", stages=[])
    factories.WorkerFactory(stages=["orders.place"])
    late = factories.ago(hours=3)
    factories.QueueMessageFactory.create_batch(
        31, queue="orders.palce", available_at=late
    )
    factories.QueueMessageFactory(queue="orders.place")
    factories.OutboxMessageFactory(destination="orders.palce", dispatched=True)

    page = viewer.get(URL).content.decode()

    assert "31 messages in the embedded broker wait to be consumed" in page
    assert ", in orders.palce (31). No stage here consumes orders.palce." in page
    assert 'href="#queues"' in page
    assert page.count("no stage here") == 2
    text, code = told()
    assert "queue orders.palce: 31 waiting, 31 of them overdue" in text
    assert code == 1
    answer = viewer.get(HEALTH)
    assert (answer.status_code, answer.json()["status"]) == (503, "stuck")
    assert answer.json()["oldest"]["queue"] > 3 * 3600 - 5


def test_alarm_is_shown_only_with_permission_for_its_rows(
    somebody: Callable[..., Client],
) -> None:
    factories.WorkerFactory(kind="relay", stages=[])
    factories.DeadLetterFactory(stage="secret.place")
    factories.OutboxMessageFactory(
        destination="secret.place", created_at=factories.ago(hours=1)
    )

    page = somebody("view_worker").get(URL).content.decode()

    assert "All is well." not in page
    assert "you do not have the permission to see it" in page
    for hidden in ("secret.place", "dead letter", "overdue"):
        assert hidden not in page


@pytest.mark.django_db(transaction=True)
def test_a_relay_that_celery_runs_counts_as_live() -> None:
    for _ in range(2):
        tasks.relay_outbox()

    (worker,) = Worker.objects.all()
    assert (worker.kind, worker.name) == ("relay", "celery: relay_outbox of tests")
    assert alarms.well(status.read())


@pytest.mark.django_db(transaction=True)
def test_celery_relay_sends_heartbeats_while_it_runs() -> None:
    def heartbeat() -> dt.datetime:
        return Worker.objects.get().heartbeat_at

    def run_for_long(**_: Any) -> None:
        before = heartbeat()
        wait_until(lambda: heartbeat() > before)
        beaten.append(True)

    beaten: list[bool] = []
    factories.OutboxMessageFactory()
    signals.message_dispatched.connect(run_for_long)
    with txmsg(CONSUME={"HEARTBEAT": 0.05}):
        tasks.relay_outbox()
    signals.message_dispatched.disconnect(run_for_long)

    assert beaten
    assert Worker.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_celery_relays_of_two_services_in_one_database_both_count() -> None:
    for service in ("shop", "mail"):
        with txmsg(SERVICE=service):
            tasks.relay_outbox()

    assert status.read().attendance.relayed_services == {"shop", "mail"}


@pytest.mark.django_db(transaction=True)
def test_a_new_version_of_a_celery_relay_is_shown_and_recorded() -> None:
    for version in ("1", "1", "2", "2"):
        tasks._PRESENCE.clear()  # as in another process
        with txmsg(VERSION=version):
            tasks.relay_outbox()

    assert Worker.objects.get().version == "2"
    began = AuditEntry.objects.order_by("pk").values_list("text", flat=True)
    assert [text.partition(" on ")[0] for text in began] == [
        "Version 1 began", "Version 2 began",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "middleware", [["django_txmsg.middleware.OutboxMiddleware"], []]
)
@pytest.mark.parametrize("address", ["health", "metrics"])
def test_without_a_database_probes_are_a_503(
    db: None,
    client: Client,
    settings: Any,
    middleware: list[str],
    address: str,
    tmp_path: Any,
) -> None:
    """With ATOMIC_REQUESTS or OutboxMiddleware, views run in a transaction. The views
    of the probes do not, so they can report an outage of the database."""
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, *middleware]
    broken = dict(connections.settings["default"])
    broken |= {"ATOMIC_REQUESTS": True, "NAME": "/no/such/file"}
    broken |= {"HOST": "127.0.0.1", "PORT": "1"}
    before, kept = connections.settings["default"], connections["default"]
    connections.settings["default"] = broken
    connections["default"] = connections.create_connection("default")
    try:
        response = client.get(f"/txmsg/{address}/")
    finally:
        connections.settings["default"] = before
        connections["default"] = kept

    assert response.status_code == 503
    if address == "health":
        assert response.json() == {"status": "no database"}


@pytest.mark.parametrize(
    ("known", "sent", "said"),
    [
        ((), "mails.confrim", "Was mails.confirm meant?"),
        ((), "mails.confirmed", ""),
        ((), "billing.pay", ""),
        (["billing.*"], "billing.pay", ""),
        (["billing.*"], "shipping.send", "names no other consumer"),
    ],
)
def test_destination_without_known_consumer_is_reported(
    viewer: Client,
    declared: Callable[..., None],
    settings: Any,
    known: Any,
    sent: str,
    said: str,
) -> None:
    """A broker accepts messages to any destination, so only this report shows that a
    destination is misspelt."""
    settings.TXMSG = {**settings.TXMSG, "KNOWN_DESTINATIONS": known}
    declared("mails.confirm")
    factories.WorkerFactory(kind="relay", stages=[])
    factories.WorkerFactory(stages=["mails.confirm"])
    for destination in ("mails.confirm", sent):
        factories.OutboxMessageFactory(destination=destination, dispatched=True)
    old = factories.ago(hours=30)
    factories.OutboxMessageFactory(
        destination="mails.confimr", created_at=old, dispatched_at=old
    )

    page = html.unescape(viewer.get(URL).content.decode())
    text, code = told()

    for where in (page, text):
        assert (f"No stage here consumes {sent}" in where) == bool(said)
        assert said in where
        assert ("All is well." in where) == (not said)
        assert "confimr" not in text
    assert code == 0
