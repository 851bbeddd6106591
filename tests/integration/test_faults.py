"""Tests can start `manage.py` processes on the test's own rows, wait for them, stop
them and kill them."""

from __future__ import annotations

import signal
from collections.abc import Callable

import django
import psutil
import pytest
from django.conf import settings

from tests.app.models import Order
from tests.faults import ManageProcess, hang_here, wait_until

Manage = Callable[..., ManageProcess]


def hang_at_start() -> None:
    """Hang as soon as the apps are ready."""
    hang_here("standing still")


def test_wait_until_returns_the_condition_s_value() -> None:
    answers = iter([0, "", "here"])

    assert wait_until(lambda: next(answers), interval=0) == "here"


def test_wait_until_fails_with_what_was_awaited() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.1 s: the post"):
        wait_until(lambda: False, deadline=0.1, message=lambda: "the post")


def test_a_process_that_succeeds_gives_its_output(manage: Manage) -> None:
    assert django.__version__ in manage("version").succeed()


def test_a_process_that_fails_shows_why(manage: Manage) -> None:
    with pytest.raises(AssertionError, match="Unknown command: 'nosuchcommand'"):
        manage("nosuchcommand").succeed()


def test_a_line_that_never_comes_is_a_failure_with_the_output(manage: Manage) -> None:
    process = manage("version")

    with pytest.raises(AssertionError, match=r"no line like 'never', it ended:\n\d+\."):
        process.wait_for_line("never")


def test_a_hook_holds_the_process_where_it_is_killed(manage: Manage) -> None:
    process = manage("version", hook="tests.integration.test_faults.hang_at_start")
    process.wait_for_line("standing still")
    assert process.running

    process.kill()

    assert process.wait() == -signal.SIGKILL
    assert process.output == "standing still"


def test_a_process_still_running_is_killed_at_the_end_of_its_block() -> None:
    hook = "tests.integration.test_faults.hang_at_start"
    with ManageProcess("version", hook=hook) as process:
        process.wait_for_line("standing still")

    assert not psutil.pid_exists(process.pid)


@pytest.mark.django_db(transaction=True)
def test_a_process_works_on_the_database_of_the_test(manage: Manage) -> None:
    Order.objects.create(number="from the test")

    code = (
        "from tests.app.models import Order;"
        "print(Order.objects.get().number);"
        "Order.objects.create(number='from the process')"
    )
    output = manage("shell", "--no-imports", "-c", code).succeed()

    assert "from the test" in output
    assert Order.objects.filter(number="from the process").exists()


def test_a_process_takes_settings_of_its_own(manage: Manage) -> None:
    code = "from django.conf import settings; print(settings.TXMSG)"
    process = manage("shell", "-c", code, txmsg={"SERVICE": "another"})

    assert "'SERVICE': 'another'" in process.succeed()
    assert settings.TXMSG["SERVICE"] == "tests"
