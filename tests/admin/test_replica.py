"""Pages while a router reads from a replica that lags behind."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import Model
from django.test import Client

from django_txmsg.models import BulkOperation
from tests import factories
from tests.running import declared

pytestmark = pytest.mark.django_db(databases=["default", "other"])


class ReadsFromAReplica:
    """A database router that reads the tables of django_txmsg from a replica."""

    def db_for_read(self, model: type[Model], **hints: object) -> str | None:
        return "other" if model._meta.app_label == "django_txmsg" else None

    def db_for_write(self, model: type[Model], **hints: object) -> str:
        return "default"


@pytest.fixture(autouse=True)
def replica(settings: Any) -> None:
    settings.DATABASE_ROUTERS = [f"{__name__}.ReadsFromAReplica"]


def test_the_page_of_a_message_is_that_of_the_primary(operator: Client) -> None:
    row = factories.OutboxMessageFactory(body=b'{"order": "A-1"}')
    page = f"/admin/django_txmsg/outboxmessage/{row.message_id}/"

    assert "A-1" in operator.get(page).content.decode()
    by_pk = operator.get(f"/admin/django_txmsg/outboxmessage/{row.pk}/change/")
    assert by_pk["Location"] == page
    assert b"A-1" in operator.get(f"{page}body/outbox/{row.pk}/").content


def test_the_page_of_a_bulk_operation_is_that_of_the_primary(operator: Client) -> None:
    row = BulkOperation.objects.using("default").create(kind="redeliver")
    page = operator.get(f"/admin/django_txmsg/bulkoperation/{row.pk}/change/")
    assert page.status_code == 200


def test_the_stages_show_a_rate_that_was_just_set(admin_client: Client) -> None:
    with declared(print, "tests.limited", rate="900/m"):
        form = {"stage": "tests.limited", "rate": "7/m"}
        admin_client.post("/admin/django_txmsg/stagestate/limit/", form)
        page = admin_client.get("/admin/django_txmsg/stagestate/").content.decode()
    assert "Reset the rate of tests.limited" in page
