"""The package's Celery tasks, executed by a real worker process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from django_txmsg.models import OutboxMessage, QueueMessage
from tests import factories as make
from tests.factories import ago
from tests.faults import ROOT, wait_until
from tests.services import RabbitMQ
from tests.services.keeper import KEEPER
from tests.services.stomp_server import PASSWORD, USER

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., Path]


@pytest.fixture
def celery(tmp_path: Path, rabbitmq: RabbitMQ, destination: str) -> Iterator[Start]:
    """Return a function that starts a Celery worker. The workers end with the test."""
    started: list[subprocess.Popen[bytes]] = []
    url = f"amqp://{USER}:{PASSWORD}@127.0.0.1:{rabbitmq.amqp_port}//"

    def start(*arguments: str, **txmsg: Any) -> Path:
        said = tmp_path / f"said-{len(started)}.log"
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "tests.celery_app", *arguments],
                cwd=ROOT,
                env={
                    **os.environ,
                    "C_FORCE_ROOT": "1",
                    "TXMSG_TEST_CELERY_URL": url,
                    "TXMSG_TEST_CELERY_QUEUE": destination,
                    "TXMSG_TEST_SETTINGS": json.dumps(txmsg),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        KEEPER.watch(process.pid, signal.SIGKILL)
        started.append(process)
        return said

    yield start
    for process in started:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(15)
        KEEPER.forget(process.pid)


def test_a_worker_with_beat_relays_and_prunes(celery: Start, tmp_path: Path) -> None:
    rows = make.OutboxMessageFactory.create_batch(30)
    old = make.OutboxMessageFactory(dispatched=True, created_at=ago(days=30))

    said = celery(
        "worker", "--pool", "solo", "--beat", "--loglevel", "INFO",
        "--schedule", str(tmp_path / "schedule"),
    )  # fmt: skip

    wait_until(
        lambda: (
            OutboxMessage.objects.filter(
                pk__in=[row.pk for row in rows], dispatched_at__isnull=False
            ).count()
            == 30
        ),
        deadline=60,
        message=said.read_text,
    )
    wait_until(
        lambda: not OutboxMessage.objects.filter(pk=old.pk).exists(),
        deadline=60,
        message=said.read_text,
    )
    assert QueueMessage.objects.count() == 30
    wait_until(lambda: "'outbox messages': 1" in said.read_text(), deadline=30)


def test_a_broker_that_is_down_does_not_hold_up_the_others(
    celery: Start, tmp_path: Path
) -> None:
    waiting = make.OutboxMessageFactory(broker="away")
    leaving = make.OutboxMessageFactory()

    said = celery(
        "worker", "--pool", "solo", "--beat", "--loglevel", "INFO",
        "--schedule", str(tmp_path / "schedule"),
        BROKERS={
            "away": {"URL": "stomp://localhost:1?connect_timeout=2"},
            "default": {"URL": "database://"},
        },
    )  # fmt: skip

    wait_until(
        lambda: OutboxMessage.objects.filter(
            pk=leaving.pk, dispatched_at__isnull=False
        ).exists(),
        deadline=60,
        message=said.read_text,
    )
    wait_until(lambda: "'unavailable': {'away'" in said.read_text(), deadline=30)
    waiting.refresh_from_db()
    assert (waiting.dispatched_at, waiting.attempts) == (None, 0)
    assert "raised unexpected" not in said.read_text()


def test_without_celery_the_import_says_what_to_install() -> None:
    program = (
        "import sys, django\n"
        "sys.modules['celery'] = None\n"
        "django.setup()\n"
        "import django_txmsg.tasks\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 1
    assert 'Run: pip install "django_txmsg[celery]"' in done.stderr
