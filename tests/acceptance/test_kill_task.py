"""A process is killed in the middle of a task. The task is delivered again, and takes
effect once."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.test import override_settings

from django_txmsg.models import TaskRun
from tests.app import jobs
from tests.app.models import Effect
from tests.faults import ManageProcess, wait_until
from tests.running import IMPATIENT, committing, txmsg

pytestmark = committing

BROKERS = {"BROKERS": {"default": {"URL": "database://?poll=0.01&lease=2"}}}


@pytest.mark.parametrize(("mode", "effects"), [("outbox", 1), ("none", 2)])
def test_task_of_a_killed_worker_takes_effect_as_its_mode_says(
    mode: str,
    effects: int,
    manage: Callable[..., ManageProcess],
    tmp_path: Path,
) -> None:
    backend: dict[str, Any] = {
        "BACKEND": "django_txmsg.tasks_backend.TransactionalBackend",
        "OPTIONS": {"TRANSACTION": mode},
    }
    settings = {"default": backend}
    env = {"TXMSG_TEST_TASKS": json.dumps(settings)}
    given = {**IMPATIENT, **BROKERS}
    with txmsg(**BROKERS), override_settings(TASKS=settings):
        result = jobs.die_once.enqueue("killed", str(tmp_path / "marker"))
        call_command("relay", once=True)
        first = manage("consume", env=env, txmsg=given)
        assert first.wait() == -signal.SIGKILL
        result.refresh()
        assert result.status == "RUNNING", "nobody knows yet"

        second = manage("consume", env=env, txmsg=given)

        def finished() -> bool:
            result.refresh()
            return bool(result.is_finished)

        wait_until(finished, deadline=60.0, message=lambda: second.output)
        assert (result.status, result.return_value) == ("SUCCESSFUL", "killed")
        assert result.attempts == 2
        # Without a transaction, what the first one did before its end is there too.
        assert Effect.objects.count() == effects
        assert TaskRun.objects.count() == 1
        second.terminate()
        assert second.wait() == 0
