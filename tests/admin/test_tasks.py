"""Tasks in the admin and in the command are shown by name, with masked arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings
from django.core.management import call_command
from django.test import Client, override_settings

from django_txmsg.models import DeadLetter
from django_txmsg.testing import drain
from tests import factories
from tests.app import jobs

BACKEND = "django_txmsg.tasks_backend.TransactionalBackend"
PATH = "tests.app.jobs.fail"
LISTS = "/admin/django_txmsg/"


def hide(destination: str, headers: dict[str, str], body: Any) -> Any:
    """A mask that hides the card's owner."""
    kwargs = dict.fromkeys(body["kwargs"], "***") if body else {}
    return headers, body and {"args": ["***"] * len(body["args"]), "kwargs": kwargs}


@pytest.fixture
def task(db: None) -> Iterator[Any]:
    """A task that has failed: a dead letter."""
    with override_settings(TASKS={"default": {"BACKEND": BACKEND}}):
        result = jobs.fail.enqueue("4111 1111", card="5500 0000")
        drain(raises=False)
        yield result


def page_of(client: Client, path: str) -> str:
    response = client.get(path)
    assert response.status_code == 200
    return response.content.decode()


def test_lists_name_the_task_without_its_arguments(task: Any, viewer: Client) -> None:
    other = factories.DeadLetterFactory(headers={"task": "call Mrs Smith"})
    for path in ("outboxmessage/", "deadletter/", "deadletter/?resolution=open"):
        page = page_of(viewer, LISTS + path)
        assert PATH in page, path
        assert "4111 1111" not in page
        assert "Mrs Smith" not in page, "a header of that name in other messages"
    assert DeadLetter.objects.exclude(pk=other.pk).count() == 1


def test_stages_page_lists_the_queue_of_a_task(task: Any, viewer: Client) -> None:
    assert "tests.tasks.default.default" in page_of(viewer, LISTS + "stagestate/")


def test_page_of_a_task_shows_its_arguments_masked(task: Any, somebody: Any) -> None:
    address = f"{LISTS}outboxmessage/{task.id}/"
    views = ("view_outboxmessage", "view_deadletter")
    reader = somebody(*views, "view_message_body")

    page = page_of(reader, address)
    assert f"<code>{PATH}</code>" in page
    assert "4111 1111" in page
    assert "4111 1111" not in page_of(somebody(*views), address)
    masked = {**settings.TXMSG, "MASK": f"{__name__}.hide"}
    with override_settings(TXMSG=masked):
        page = page_of(reader, address)
    assert "***" in page
    assert "4111 1111" not in page
    assert "5500 0000" not in page


def test_the_dead_letters_command_names_the_task(
    task: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    call_command("dead_letters", "list")
    assert PATH in capsys.readouterr().out
    call_command("dead_letters", "show", str(DeadLetter.objects.get().pk))
    assert f"task: {PATH}\n" in capsys.readouterr().out
