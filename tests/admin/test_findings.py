"""Findings of the pipeline in the admin: permissions to acknowledge them, and the
record."""

from __future__ import annotations

import uuid

import pytest
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db.models import Model
from django.test import Client, override_settings
from django.utils import timezone

from django_txmsg.spark.models import Finding

pytestmark = pytest.mark.django_db
URL = "/admin/txmsg_spark/finding/"


@pytest.fixture
def findings() -> list[Finding]:
    now = timezone.now()
    return [
        Finding.objects.create(
            id=uuid.uuid4(), service="shop", verdict="never_received", found_at=now,
            message_id=uuid.uuid4(), destination=f"<b>{number}", seen_at=now,
        )
        for number in range(3)
    ]  # fmt: skip


def log_in(*codenames: str) -> Client:
    user = User.objects.create_user(f"ann-{len(codenames)}", is_staff=True)
    user.user_permissions.set(
        Permission.objects.filter(
            content_type__app_label="txmsg_spark", codename__in=codenames
        )
    )
    client = Client()
    client.force_login(user)
    return client


def test_findings_are_acknowledged_with_a_note_and_opened_again(
    findings: list[Finding],
) -> None:
    client = log_in("view_finding", "acknowledge_finding")
    chosen = {ACTION_CHECKBOX_NAME: [str(one.pk) for one in findings[:2]]}
    listing = client.get(URL).content.decode()
    assert "&lt;b&gt;1" in listing
    assert f'{findings[0].message_id}/">' in listing

    asked = client.post(URL, {"action": "acknowledge", "index": 0, **chosen})
    empty = client.post(URL, {"action": "acknowledge", "note": " ", **chosen})
    assert "Acknowledge 2 findings" in asked.content.decode()
    assert "Say why" in empty.content.decode()
    assert not Finding.objects.exclude(acknowledged_at=None).exists()
    done = client.post(URL, {"action": "acknowledge", "note": "a <i>drill", **chosen})

    assert done.status_code == 302
    said = Finding.objects.exclude(acknowledged_at=None)
    assert {one.pk for one in said} == {one.pk for one in findings[:2]}
    assert {(one.acknowledged_by, one.note) for one in said} == {
        ("ann-2", "a <i>drill")
    }
    page = client.get(URL, {"acknowledged_at__isempty": "0"}).content.decode()
    assert "a &lt;i&gt;drill" in page
    assert str(findings[2].pk) not in page
    assert client.get(f"{URL}{findings[0].pk}/change/").status_code == 200
    entries = LogEntry.objects.values_list("object_id", "change_message")
    assert set(entries) == {
        (str(one.pk), "Acknowledged: a <i>drill") for one in findings[:2]
    }
    client.post(URL, {"action": "reopen", "index": 0, **chosen})
    assert not Finding.objects.exclude(acknowledged_at=None).exists()
    assert LogEntry.objects.count() == 4


def test_view_permission_alone_cannot_acknowledge(findings: list[Finding]) -> None:
    client = log_in("view_finding")
    chosen = {ACTION_CHECKBOX_NAME: [str(findings[0].pk)]}

    client.post(URL, {"action": "acknowledge", "note": "why", **chosen})

    assert "Acknowledge…" not in client.get(URL).content.decode()
    assert not Finding.objects.exclude(acknowledged_at=None).exists()
    assert log_in("view_finding", "x").get(f"{URL}add/").status_code == 403
    assert log_in().get(URL).status_code == 403


def test_all_that_match_are_acknowledged(findings: list[Finding]) -> None:
    client = log_in("view_finding", "acknowledge_finding")
    chosen = {
        ACTION_CHECKBOX_NAME: [str(findings[0].pk)], "select_across": "1",
        "action": "acknowledge", "note": "a drill",
    }  # fmt: skip

    client.post(f"{URL}?verdict=never_received", chosen)

    assert Finding.objects.filter(note="a drill").count() == 3


class FindingsOnAReplica:
    """A router of a project with a replica that lags behind."""

    def db_for_read(self, model: type[Model], **hints: object) -> str | None:
        return "other" if model is Finding else None


@pytest.mark.django_db(databases=["default", "other"])
def test_finding_read_from_a_replica_is_acknowledged_at_the_primary(
    findings: list[Finding],
) -> None:
    client = log_in("view_finding", "acknowledge_finding")
    for one in findings:
        one.save(using="other", force_insert=True)
    chosen = {ACTION_CHECKBOX_NAME: [str(one.pk) for one in findings[:2]]}
    router = f"{__name__}.FindingsOnAReplica"

    with override_settings(DATABASE_ROUTERS=[router]):
        asked = {"action": "acknowledge", "note": "a drill", "index": 0, **chosen}
        assert client.post(URL, asked).status_code == 302

    known = Finding.objects.exclude(acknowledged_at=None)
    assert known.using("default").count() == 2
    assert not known.using("other").exists()
