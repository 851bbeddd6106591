"""The endpoints for load balancers and Prometheus."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test import Client
from prometheus_client import REGISTRY, CollectorRegistry

from django_txmsg import metrics, signals
from tests import factories
from tests.faults import ManageProcess


@pytest.mark.parametrize(
    ("minutes", "status", "code"),
    [(0, "ok", 200), (3, "late", 200), (12, "degraded", 200), (45, "stuck", 503)],
)
def test_health_by_the_oldest_due_message(
    db: None, client: Client, minutes: int, status: str, code: int
) -> None:
    if minutes:
        factories.OutboxMessageFactory(created_at=factories.ago(minutes=minutes))
    factories.OutboxMessageFactory(due_at=factories.ago(hours=-1))

    response = client.get("/txmsg/health/")

    assert response.status_code == code
    assert response.json()["status"] == status
    assert "no-store" in response["Cache-Control"]


def test_health_looks_at_redeliveries_too(db: None, client: Client) -> None:
    factories.InboxMessageFactory(parked=True, due_at=factories.ago(minutes=31))

    assert client.get("/txmsg/health/").status_code == 503


@pytest.mark.parametrize(
    ("minutes", "status"), [(1, "ok"), (14, "ok"), (16, "degraded"), (300, "degraded")]
)
def test_a_rolling_deployment_takes_no_process_out_of_service(
    db: None, client: Client, minutes: int, status: str
) -> None:
    since = factories.ago(minutes=minutes)
    factories.InboxMessageFactory(
        parked=True,
        due_at=since,
        first_received_at=since,
        needs_type="shop.Order",
        needs_version=3,
    )

    response = client.get("/txmsg/health/")

    answer = response.json()
    assert (response.status_code, answer["status"]) == (200, status)
    assert answer["oldest"]["redelivery"] == 0
    assert 60 * minutes <= answer["needs_newer_code"] < 60 * minutes + 30


@pytest.mark.parametrize(
    ("minutes", "fail", "code"),
    [
        (3, "late", 503),
        (3, "degraded", 200),
        (12, "degraded", 503),
        (12, "late", 503),
        (45, "never", 200),
        (45, "", 503),
    ],
)
def test_health_fails_from_the_state_that_is_asked_for(
    db: None, client: Client, minutes: int, fail: str, code: int
) -> None:
    factories.OutboxMessageFactory(created_at=factories.ago(minutes=minutes))

    assert client.get("/txmsg/health/", {"fail": fail}).status_code == code


def test_health_without_a_database_is_a_503(db: None, client: Client) -> None:
    def refuse(*_: Any) -> Any:
        raise OperationalError("the database is away")

    with connection.execute_wrapper(refuse):
        response = client.get("/txmsg/health/")

        never = client.get("/txmsg/health/", {"fail": "never"})

    assert response.status_code == 503
    assert never.status_code == 200
    assert response.json() == never.json() == {"status": "no database"}


def test_health_tells_nothing_but_ages_and_asks_for_get(
    db: None, client: Client
) -> None:
    factories.OutboxMessageFactory(destination="secret.place")

    assert b"secret" not in client.get("/txmsg/health/").content
    assert client.post("/txmsg/health/").status_code == 405


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    """A registry for the metrics of one test."""
    metrics.uninstall()
    own = CollectorRegistry()
    metrics.install(own)
    yield own
    metrics.uninstall()


def test_metrics_count_what_the_process_does(registry: CollectorRegistry) -> None:
    place = {"stage": "orders.place", "destination": "orders.place"}
    facts: dict[str, Any] = {"sender": None, "id": uuid.uuid4(), **place}
    signals.message_processed.send_robust(
        attempt=1, duration=0.02, critical_time=0.3, employed=True, **facts
    )
    signals.message_processed.send_robust(
        attempt=1, duration=0.02, critical_time=None, employed=True, **facts
    )
    signals.message_redelivered.send_robust(attempt=1, delay=1.0, error="x", **facts)
    signals.message_duplicate.send_robust(**facts)
    signals.message_buried.send_robust(attempt=7, reason="refused", error="x", **facts)
    signals.lease_lost.send_robust(sender=None, count=3, broker="default")
    signals.outcome_unknown.send_robust(sender=None, count=2, broker="default")
    signals.dangerous_window.send_robust(
        sender=None, stage="orders.place", seconds=0.004, failed=True, employed=True
    )

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"txmsg_{name}", labels)

    assert value("processing_seconds_count", **place) == 2
    assert value("critical_seconds_count", **place) == 1
    assert value("critical_seconds_bucket", le="0.25", **place) == 0
    assert value("critical_seconds_bucket", le="0.5", **place) == 1
    assert value("redeliveries_total", **place) == 1
    assert value("duplicates_total", **place) == 1
    assert value("buried_total", reason="refused", **place) == 1
    assert value("lease_lost_total", broker="default") == 3
    assert value("outcome_unknown_total", broker="default") == 2
    assert value("dangerous_window_seconds_count", stage="orders.place") == 1
    assert value("dangerous_window_failed_total", stage="orders.place") == 1


def test_too_many_destinations_are_counted_together(
    registry: CollectorRegistry,
) -> None:
    facts = {"stage": "", "reason": "broker"}
    for number in [*range(1100), 7]:
        signals.message_buried.send_robust(
            sender=None, destination=f"from.the.wire.{number}", **facts
        )

    def value(destination: str) -> float | None:
        labels = {"destination": destination, **facts}
        return registry.get_sample_value("txmsg_buried_total", labels)

    assert value("from.the.wire.7") == 2
    assert value("from.the.wire.1007") is None
    assert value("other") == 100


def test_metrics_count_sessions_and_control_messages(
    registry: CollectorRegistry,
) -> None:
    facts: dict[str, Any] = {
        "sender": None,
        "session_id": uuid.uuid4(),
        "using": "default",
    }
    for outcome, duration in (("committed", 0.02), ("failed", 0.7)):
        signals.session_ended.send_robust(
            outcome=outcome, duration=duration, stored=2, **facts
        )
    signals.control_message_sent.send_robust(
        outcome="sent", duration=0.003, error=None, **facts
    )
    for attempts, transit_time in ((1, 0.02), (4, None)):
        signals.control_message_handled.send_robust(
            outcome="dispatched",
            attempts=attempts,
            transit_time=transit_time,
            headers={},
            **facts,
        )

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"txmsg_{name}", labels)

    assert value("session_seconds_count", outcome="committed") == 1
    assert value("session_seconds_sum", outcome="failed") == 0.7
    assert value("control_message_send_seconds_count", outcome="sent") == 1
    assert value("control_message_attempts_count", outcome="dispatched") == 2
    assert value("control_message_attempts_sum", outcome="dispatched") == 5
    assert value("control_message_attempts_bucket", outcome="dispatched", le="3.0") == 1
    # Without a time of sending that can be read, nothing is said of the transit.
    assert value("control_message_transit_seconds_count") == 1


def test_a_scrape_reads_the_database(db: None, client: Client) -> None:
    factories.OutboxMessageFactory(created_at=factories.ago(minutes=10))
    factories.OutboxMessageFactory(destination='odd "name"\n')
    factories.InboxMessageFactory(parked=True)
    factories.DeadLetterFactory()
    factories.QueueMessageFactory()
    factories.WorkerFactory(name="w-1", heartbeat_at=factories.ago(seconds=40))
    factories.StageStateFactory()

    text = client.get("/txmsg/metrics/").content.decode()
    text = text.replace('database="default",', "")

    assert 'txmsg_outbox_waiting{destination="orders.place"} 1.0' in text
    assert 'txmsg_outbox_overdue{destination="orders.place"} 1.0' in text
    assert 'txmsg_outbox_waiting{destination="odd \\"name\\"\\n"} 1.0' in text
    assert 'txmsg_redelivery_waiting{stage="orders.place"} 1.0' in text
    assert 'txmsg_stage_dead{stage="orders.place"} 1.0' in text
    assert 'txmsg_stage_paused{stage="orders.place"} 1.0' in text
    assert 'txmsg_queue_waiting{destination="orders.place"} 1.0' in text
    (age,) = (
        line.split()[1]
        for line in text.splitlines()
        if line.startswith('txmsg_worker_heartbeat_age_seconds{worker="w-1"}')
    )
    assert 39 < float(age) < 100
    assert "python_info" in text or not REGISTRY.get_sample_value("python_info")


def test_all_processes_answer_through_one_directory(
    db: None,
    manage: Callable[..., ManageProcess],
    tmp_path: Path,
) -> None:
    shared = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    work = (
        "from django_txmsg import metrics, signals; metrics.install();"
        "signals.lease_lost.send(sender=None, count=2, broker='default')"
    )
    for _ in range(2):
        manage("shell", "-c", work, env=shared).succeed()

    text = manage(
        "shell",
        "-c",
        "from django.test import Client;"
        "print(Client().get('/txmsg/metrics/').content.decode())",
        env=shared,
    ).succeed()

    assert 'txmsg_lease_lost_total{broker="default"} 4.0' in text
