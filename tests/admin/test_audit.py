"""Pages and commands record their actions in the audit, and an operator can search it.
A page lists the user's permissions."""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from pathlib import Path

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.utils import timezone

import django_txmsg
from django_txmsg.dead_letters import bulk
from django_txmsg.models import AuditEntry, BulkOperation, DeadLetter
from django_txmsg.models.bulk_operation import BulkState
from django_txmsg.models.monitoring import Deed
from tests import factories

pytestmark = pytest.mark.django_db

AUDIT = "/admin/django_txmsg/auditentry/"
MAY = f"{AUDIT}may-i/"


def rows(client: Client, **query: str) -> list[list[str]]:
    """Return the cells of the audit's rows."""
    page = client.get(AUDIT, query).content.decode()
    cells = r'<t[dh] class="field-\w+">(.*?)</t[dh]>'
    found = re.findall(r"<tr>(?:(?!</tr>).)*field-when.*?</tr>", page, re.DOTALL)
    return [
        [
            " ".join(html.unescape(re.sub(r"<[^>]*>", "", one)).split())
            for one in re.findall(cells, row, re.DOTALL)
        ]
        for row in found
    ]


def test_pages_and_commands_record_who_did_what_why_and_how_often(
    admin_client: Client, declared: Callable[..., None]
) -> None:
    declared("mail.send")
    for _ in range(3):
        factories.DeadLetterFactory(stage="mail.send")
    confirm = "/admin/django_txmsg/deadletter/confirm/"
    admin_client.post(
        confirm, {"kind": "discard", "stage": "mail.send", "why": "test letters"}
    )
    call_command(
        "txmsg", "stages", "pause", "mail.send", "--why", "moving", stdout=StringIO()
    )
    call_command("dead_letters", "restore", "--all", stdout=StringIO())

    restored, paused, discarded = rows(admin_client)

    assert discarded[1:3] == ["admin", "discard"]
    assert "3 dead letters" in discarded[5]
    assert "why: test letters" in discarded[5]
    assert discarded[3:5] == ["3", "3 done"]
    assert paused[1].startswith("command: ")
    assert paused[2:] == ["pause", "1", "1", "Paused stage mail.send: moving"]
    assert restored[1].startswith("command: ")
    assert restored[2:5] == ["restore", "3", "3 done"]


def test_a_user_whose_name_is_not_text_is_recorded(
    admin_client: Client,
    declared: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A project's own user model may have an integer or a UUID as USERNAME_FIELD."""
    monkeypatch.setattr(User, "USERNAME_FIELD", "id")
    declared("mail.send")
    letter = factories.DeadLetterFactory(stage="mail.send", fingerprint="f" * 64)
    note = {"fingerprint": letter.fingerprint, "note": "ticket 7"}
    for page, form in (
        ("stagestate/pause/", {"stage": "mail.send"}),
        ("deadletter/note/", note),
        ("deadletter/confirm/", {"kind": "discard", "stage": "mail.send"}),
    ):
        assert admin_client.post(f"/admin/django_txmsg/{page}", form).status_code == 302

    assert {row[1] for row in rows(admin_client)} == {str(User.objects.get().pk)}
    letter.refresh_from_db()
    assert letter.resolved_by == str(User.objects.get().pk)


def test_the_audit_counts_what_a_running_operation_has_done_so_far(
    admin_client: Client,
) -> None:
    for _ in range(5):
        factories.DeadLetterFactory()
    operation = bulk.start("discard", {}, by="grace")
    AuditEntry.objects.record(
        "grace", "Discard.", deed=Deed.DISCARD, count=5, operation=operation
    )
    BulkOperation.objects.filter(pk=operation.pk).update(done=2)

    [[*_, shown, done, _]] = rows(admin_client)

    assert (shown, done) == ("5", "2 running")
    assert operation.state == BulkState.RUNNING


def test_the_audit_is_filtered_by_operator_deed_and_date(
    admin_client: Client,
) -> None:
    day = timezone.now() - timedelta(days=3)
    for by, deed in (
        ("grace", Deed.DISCARD),
        ("ada", Deed.DISCARD),
        ("command: grace", Deed.PAUSE),
    ):
        AuditEntry.objects.record(by, f"{deed} by {by}", deed=deed)
    AuditEntry.objects.filter(by="ada").update(at=day)

    def found(**query: str) -> set[str]:
        return {cells[1] for cells in rows(admin_client, **query)}

    assert found(by="grace") == {"grace"}
    assert found(deed="pause") == {"command: grace"}
    assert found(by="ada", deed="pause") == set()
    before = (day + timedelta(hours=1)).isoformat()
    assert found(before=before) == {"ada"}
    assert found(since=before) == {"grace", "command: grace"}
    page = admin_client.get(AUDIT).content.decode()
    assert "command: grace (1)" in page
    out = StringIO()
    call_command("txmsg", "audit", "--deed", "pause", stdout=out)
    assert "pause by command: grace" in out.getvalue()
    assert "ada" not in out.getvalue()


def test_every_deed_is_recorded_somewhere() -> None:
    """For each kind of action in the audit's filter, some code records such actions.
    Otherwise one choice of the filter would never find an entry."""
    package = Path(django_txmsg.__file__).parent
    named = {
        node.attr
        for path in package.rglob("*.py")
        if path.name != "monitoring.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "Deed"
    }
    # Bulk operations name theirs by the operation's kind.
    of_kinds = {"REDELIVER", "DISCARD", "RESTORE", "GO_BACK"}
    assert named | of_kinds == {one.name for one in Deed}


def allowed(client: Client) -> tuple[set[str], set[str]]:
    """Return two lists from the page: the permissions shown as granted, and those shown
    as missing."""
    page = client.get(MAY).content.decode()
    granted, _, denied = page.partition("<h2>You may not</h2>")
    names = r"<code>(\w+\.\w+)</code>"
    return set(re.findall(names, granted)), set(re.findall(names, denied))


def test_may_i_tells_each_permission_and_whether_the_user_has_it(
    somebody: Callable[..., Client],
) -> None:
    granted, denied = allowed(somebody("view_deadletter", "discard_deadletter"))

    assert granted == {
        "django_txmsg.view_deadletter",
        "django_txmsg.discard_deadletter",
    }
    assert denied >= {
        "django_txmsg.redeliver_deadletter",
        "django_txmsg.view_auditentry",
        "django_txmsg.delete_idempotencykey",
        "txmsg_spark.acknowledge_finding",
    }


def test_may_i_needs_no_permission_and_links_only_to_pages_that_open(
    somebody: Callable[..., Client], admin_client: Client
) -> None:
    nobody = somebody()
    assert allowed(nobody)[0] == set()
    assert (
        'href="/admin/django_txmsg/deadletter/"'
        not in (nobody.get(MAY).content.decode().partition('id="content-main"')[2])
    )
    assert nobody.get(AUDIT).status_code == 403
    assert allowed(admin_client)[1] == set()
    for link in re.findall(
        r'<td><a href="([^"]+)">', admin_client.get(MAY).content.decode()
    ):
        assert admin_client.get(link).status_code == 200, link
    assert Client().get(MAY).status_code == 302
    assert "May I?</a>" in admin_client.get(AUDIT).content.decode()


def test_may_i_lists_each_permission_that_the_code_asks_for() -> None:
    """The page lists each permission that a button requires."""
    package = Path(django_txmsg.__file__).parent / "admin"
    texts = "\n".join(path.read_text() for path in package.glob("*.py"))
    asked = set(re.findall(r'"(?:django_txmsg|txmsg_spark)\.(\w+_\w+)"', texts))
    asked |= {f"pause_{kind}" for kind in ("stage", "schedule")}
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    listed = {one.partition(".")[2] for one in allowed(client)[0]}
    assert asked - listed == set()
    assert "redeliver_deadletter" in asked
    assert DeadLetter._meta.permissions
