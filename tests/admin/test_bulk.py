"""The page of a bulk operation, and the list of all bulk operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from django_txmsg.dead_letters import bulk
from tests import factories
from tests.running import txmsg

URL = "/admin/django_txmsg/bulkoperation/"


def test_progress_is_shown(operator: Client) -> None:
    factories.DeadLetterFactory.create_batch(150)
    operation = bulk.start("discard", {"stage": "orders.place"}, by="ada")
    bulk.work_batch("default")

    page = operator.get(f"{URL}{operation.pk}/change/").content.decode()

    assert "<b>100</b> of 150 messages, 66 %" in page
    assert "stage orders.place" in page
    assert "ada" in page
    assert 'data-txmsg-live="on"' in page


def test_large_counts_are_exact(operator: Client) -> None:
    operation = bulk.start("discard", {})
    operation.total, operation.done = 200_000, 60_001
    operation.save(update_fields=["total", "done"])

    page = operator.get(f"{URL}{operation.pk}/change/").content.decode()

    assert "<b>60,001</b> of 200,000 messages, 30 %" in page


def test_an_ended_operation_is_not_watched_any_more(operator: Client) -> None:
    factories.DeadLetterFactory()
    operation = bulk.finish(bulk.start("discard", {}))

    page = operator.get(f"{URL}{operation.pk}/change/").content.decode()

    assert "<b>1</b> of 1 message, 100 %" in page
    assert 'data-txmsg-live="off"' in page


def test_an_operation_without_a_consumer_of_its_service_says_so(
    operator: Client,
) -> None:
    operation = bulk.start("discard", {})
    address = f"{URL}{operation.pk}/change/"
    missing = "No consumer of tests is running."

    factories.WorkerFactory(service="shop")
    assert missing in operator.get(address).content.decode()
    renamed = txmsg(SERVICE="shop", FORMER_SERVICES=("tests",))
    with renamed:
        assert missing not in operator.get(address).content.decode()
    factories.WorkerFactory(service="tests")
    assert missing not in operator.get(address).content.decode()


def test_pause_resume_and_cancel(operator: Client) -> None:
    factories.DeadLetterFactory.create_batch(3)
    operation = bulk.start("redeliver", {})

    for verb, state in (
        ("pause", "paused"),
        ("resume", "running"),
        ("cancel", "cancelled"),
    ):
        operator.post(f"{URL}{operation.pk}/{verb}/")
        operation.refresh_from_db()
        assert operation.state == state
    assert LogEntry.objects.count() == 3
    assert bulk.work_batch("default") is None
    again = operator.post(f"{URL}{operation.pk}/resume/", follow=True)
    assert "The operation has ended" in again.content.decode()
    again = operator.post(f"{URL}{operation.pk}/cancel/", follow=True)
    assert "or was cancelled before" in again.content.decode()
    operation.refresh_from_db()
    assert operation.state == "cancelled"


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel"])
def test_buttons_need_the_permission_of_their_action(
    somebody: Callable[..., Client], verb: str
) -> None:
    factories.DeadLetterFactory()
    operation = bulk.start("redeliver", {})
    client = somebody("view_bulkoperation", "discard_deadletter")

    assert client.post(f"{URL}{operation.pk}/{verb}/").status_code == 403
    assert client.get(f"{URL}{operation.pk}/{verb}/").status_code == 405
    operation.refresh_from_db()
    assert operation.state == "running"
    page = client.get(f"{URL}{operation.pk}/change/").content.decode()
    assert "Cancel the rest" not in page


def test_the_list_says_who_did_what(viewer: Client) -> None:
    factories.DeadLetterFactory.create_batch(2)
    bulk.finish(bulk.start("discard", {"fingerprint": "feedfacefeedface"}, by="ada"))

    page = viewer.get(URL).content.decode()

    assert "2 of 2" in page
    assert "ada" in page
    assert "fingerprint feedfacefeedface" in page


def test_an_operation_that_is_gone_leads_back(operator: Client) -> None:
    assert (
        "no bulk operation 77"
        in operator.get(f"{URL}77/change/", follow=True).content.decode()
    )
    assert (
        "no bulk operation 77"
        in operator.post(f"{URL}77/pause/", follow=True).content.decode()
    )


def test_the_pages_need_their_permission(somebody: Callable[..., Client]) -> None:
    operation = bulk.start("discard", {})
    client = somebody("view_deadletter")

    assert client.get(URL).status_code == 403
    assert client.get(f"{URL}{operation.pk}/change/").status_code == 403
