"""Pages while a router reads from a replica that lags behind."""

from __future__ import annotations

from typing import Any

import pytest
from django.db.models import Model
from django.test import Client
from django.utils import timezone

from django_txmsg import metrics
from django_txmsg.models import Alert, BulkOperation
from django_txmsg.spark.models import PipelineAlert
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


def test_lists_groups_and_metrics_show_the_primary(admin_client: Client) -> None:
    letter = factories.DeadLetterFactory(exception="ValueError: primary")
    Alert.objects.db_manager("default").begin("tests", "dead/x", "dead", "primary")
    make = PipelineAlert.objects.using("default").create
    make(service="tests", name="primary", checked_at=timezone.now())

    for page in ("deadletter/", "deadletter/?resolution=open", "alert/"):
        shown = admin_client.get(f"/admin/django_txmsg/{page}").content.decode()
        assert "primary" in shown
    action = {"action": "discard_selected", "_selected_action": str(letter.pk)}
    asked = admin_client.post("/admin/django_txmsg/deadletter/", action, follow=True)
    assert "Discard 1 message?" in asked.content.decode()
    assert b'txmsg_pipeline_alert{alert="primary"' in metrics.of_database()
