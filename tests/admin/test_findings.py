"""Findings of the pipeline in the admin: the permissions to acknowledge and to replay
them, and the audit entries."""

from __future__ import annotations

import re
import uuid
from typing import Any

import pytest
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db.models import Model
from django.db.models.signals import pre_save
from django.test import Client, override_settings
from django.utils import timezone

from django_txmsg.admin import counting
from django_txmsg.admin.pipeline import FindingAdmin
from django_txmsg.models import AuditEntry
from django_txmsg.spark.models import Finding, PipelineRun

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
            content_type__app_label__in=("django_txmsg", "txmsg_spark"),
            codename__in=codenames,
        )
    )
    client = Client()
    client.force_login(user)
    return client


def test_findings_are_acknowledged_with_a_note_and_opened_again(
    findings: list[Finding],
) -> None:
    client = log_in("view_finding", "acknowledge_finding", "view_deadletter")
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
        ("ann-3", "a <i>drill")
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


def test_more_findings_than_lists_count_are_all_reached_and_counted(
    findings: list[Finding], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "CAP", 1)
    monkeypatch.setattr(FindingAdmin, "list_per_page", 1)
    client = log_in("view_finding", "acknowledge_finding")
    pages = [client.get(f"{URL}?p={number}") for number in (1, 2, 3)]

    rows = {row.pk for page in pages for row in page.context["cl"].result_list}
    assert rows == {one.pk for one in findings}
    # The action "Open again" changes so many without another question.
    assert "Select all 3 findings" in pages[0].content.decode()


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


def replay_page(client: Client, chosen: list[Finding]) -> dict[str, Any]:
    """Return the form data of the page that confirms a replay."""
    keys = [str(one.pk) for one in chosen]
    asked = client.post(URL, {"action": "replay", ACTION_CHECKBOX_NAME: keys})
    fields = re.findall(r'name="(\w+)" value="([^"]*)"', asked.content.decode())
    return {**dict(fields), ACTION_CHECKBOX_NAME: keys}


def test_replay_of_selected_findings_is_requested_once_and_audited(
    findings: list[Finding], settings
) -> None:
    settings.TXMSG = {**settings.TXMSG, "SERVICE": "shop"}
    sent, twice, foreign = findings
    Finding.objects.filter(pk__in=[sent.pk, twice.pk]).update(
        sender="shop", message_id=sent.message_id
    )
    client = log_in("view_finding", "replay_finding")
    page = replay_page(client, [sent, twice, foreign])
    assert not PipelineRun.objects.exists()
    assert (page["mark"].partition(".")[0], page["confirmed"]) == ("2", "1")

    done = client.post(URL, page, follow=True).content.decode()
    client.post(URL, page)

    run = PipelineRun.objects.get()
    assert (run.job, run.state, run.service) == ("replay", "requested", "shop")
    assert run.run_by == "ann-2"
    assert run.options["message_ids"] == [str(sent.message_id)]
    assert f"manage.py pipeline replay --request {run.pk}" in done
    runs = log_in("view_pipelinerun").get("/admin/txmsg_spark/pipelinerun/")
    assert '<td class="field-took">-</td>' in runs.content.decode()
    entries = LogEntry.objects.values_list("object_id", "change_message")
    assert sorted(entries) == sorted(
        (str(one.pk), f"Replay requested: run {run.pk}.") for one in (sent, twice)
    )
    assert AuditEntry.objects.count() == 2


@pytest.mark.parametrize(
    "as_of", ["", "soon", "2026-13-45T00:00:00", "0001-01-01T00:00:00+23:59"]
)
def test_replay_asks_again_if_the_time_of_its_page_is_not_what_was_shown(
    findings: list[Finding], settings, as_of: str
) -> None:
    settings.TXMSG = {**settings.TXMSG, "SERVICE": "shop"}
    Finding.objects.update(sender="shop")
    client = log_in("view_finding", "replay_finding")
    page = replay_page(client, findings) | {"as_of": as_of}

    done = client.post(URL, page)

    assert "what you were shown has changed" in done.content.decode()
    assert not PipelineRun.objects.exists()


def test_the_page_of_a_replay_says_that_it_does_not_help_dead_letters(
    findings: list[Finding], settings
) -> None:
    settings.TXMSG = {**settings.TXMSG, "SERVICE": "shop"}
    Finding.objects.update(sender="shop", verdict="dead", consumer="payments/charge")
    relays = findings[0]
    Finding.objects.filter(pk=relays.pk).update(consumer="")
    client = log_in("view_finding", "replay_finding")

    def asked(chosen: list[Finding]) -> str:
        keys = [str(one.pk) for one in chosen]
        page = client.post(URL, {"action": "replay", ACTION_CHECKBOX_NAME: keys})
        return page.content.decode()

    assert f"{len(findings) - 1} dead letters drop the copies" in asked(findings)
    assert "drop the copies" not in asked([relays])


def test_replay_without_its_permission_or_its_page_requests_nothing(
    findings: list[Finding], settings
) -> None:
    settings.TXMSG = {**settings.TXMSG, "SERVICE": "shop"}
    Finding.objects.update(sender="shop")
    page = replay_page(log_in("view_finding", "replay_finding"), findings)
    other = log_in("view_finding", "acknowledge_finding", "x")
    assert "Replay…" not in other.get(URL).content.decode()
    other.post(URL, page)
    Finding.objects.filter(pk=findings[0].pk).update(acknowledged_at=timezone.now())

    client = Client()
    client.force_login(User.objects.get(username="ann-2"))
    changed = client.post(URL, page).content.decode()

    assert "what you were shown has changed" in changed
    assert "Replay 2 findings?" in changed
    assert "1 of the selected findings is left out" in changed
    assert not PipelineRun.objects.exists()
    assert not LogEntry.objects.exists()


def test_as_many_other_findings_ask_for_confirmation_again(
    findings: list[Finding],
) -> None:
    acknowledged = {"acknowledged_at": timezone.now(), "note": "a drill"}
    known, other = Finding.objects.filter(pk=findings[0].pk), findings[1]
    known.update(**acknowledged)
    client = log_in("view_finding", "acknowledge_finding")
    keys = [str(one.pk) for one in findings]
    asked = {"action": "acknowledge", ACTION_CHECKBOX_NAME: keys}
    page = client.post(URL, asked).content.decode()
    form = dict(re.findall(r'name="(\w+)" value="([^"]*)"', page))
    known.update(acknowledged_at=None, note="")
    Finding.objects.filter(pk=other.pk).update(**acknowledged)

    done = client.post(URL, {**form, **asked, "note": "known"}).content.decode()

    assert "what you were shown has changed" in done
    assert not Finding.objects.filter(note="known").exists()


def test_request_and_its_log_entry_commit_together(
    findings: list[Finding], settings
) -> None:
    settings.TXMSG = {**settings.TXMSG, "SERVICE": "shop"}
    Finding.objects.update(sender="shop")
    client = log_in("view_finding", "replay_finding")
    page = replay_page(client, findings)

    def refuse(sender: Any, **more: Any) -> None:
        raise RuntimeError("no log")

    pre_save.connect(refuse, sender=LogEntry)
    try:
        with pytest.raises(RuntimeError, match="no log"):
            client.post(URL, page)
    finally:
        pre_save.disconnect(refuse, sender=LogEntry)

    assert not PipelineRun.objects.exists()


class FindingsOnAReplica:
    """A database router that reads findings from a replica."""

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
