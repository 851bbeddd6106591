"""The page of the keys, flows and tenants that dead letters affect. Its counts match
the rows, and masked values appear nowhere. An export needs a permission, and is
recorded in the audit."""

from __future__ import annotations

import csv
import html
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from django_txmsg import wire
from django_txmsg.models import AuditEntry, DeadLetter
from tests import factories

pytestmark = pytest.mark.django_db

PAGE = "/admin/django_txmsg/deadletter/affected/"
ERROR = "affe11affe11affe"


def mask(
    destination: str, headers: Mapping[str, str], body: Any
) -> tuple[dict[str, str], Any]:
    """Hide the key, and shorten the tenant."""
    shown = {n: v for n, v in headers.items() if n != wire.KEY}
    if "tenant" in shown:
        shown["tenant"] = shown["tenant"][:1] + "***"
    return shown, body


def broken_mask(*_: object) -> None:
    """Fail for every message."""
    raise LookupError("the mask is broken")


@pytest.fixture(autouse=True)
def tenants(settings: Any) -> None:
    settings.TXMSG = {**settings.TXMSG, "TENANT_HEADER": "tenant"}


def letters(number: int = 40) -> None:
    """Store dead letters with 13 keys, 7 flows and 3 tenants. Some have no key, no flow
    or no tenant."""
    for n in range(number):
        headers = {} if n % 8 == 0 else {wire.KEY: f"key-{n % 13}"}
        if n % 5:
            headers["tenant"] = f"tenant-{n % 3}"
        factories.DeadLetterFactory(
            fingerprint=ERROR,
            headers=headers,
            correlation_id=f"flow-{n % 7}" if n % 4 else "",
        )
    # These are not of the group.
    factories.DeadLetterFactory(headers={wire.KEY: "another", "tenant": "another"})
    factories.DeadLetterFactory(
        fingerprint=ERROR, discarded=True, headers={"tenant": "discarded"}
    )


def shown(client: Client) -> dict[str, tuple[str, list[tuple[str, int]]]]:
    """Return the heading and the rows of each part of the page."""
    page = client.get(PAGE, {"fingerprint": ERROR}).content.decode()
    found = {}
    for part in page.split("<h2>")[1:]:
        heading = re.sub(r"<[^>]*>", "", part.partition("</h2>")[0])
        rows = re.findall(r"<code>(.*?)</code></td><td class=.number.>(\d+)", part)
        kind = heading.split()[1].rstrip("s")
        found[kind] = (heading, [(html.unescape(v), int(n)) for v, n in rows])
    return found


def counted(value: Callable[[DeadLetter], str | None]) -> tuple[Counter[str], int]:
    """Count the open dead letters for each value. Return these counts, and the number
    of dead letters without a value."""
    rows = DeadLetter.objects.filter(fingerprint=ERROR, resolution="open")
    found = Counter(value(row) or "" for row in rows)
    without = found.pop("", 0)
    return found, without


def test_the_page_counts_what_the_rows_contain(admin_client: Client) -> None:
    letters()
    parts = shown(admin_client)

    for kind, value in (
        ("key", lambda row: row.headers.get(wire.KEY)),
        ("flow", lambda row: row.correlation_id),
        ("tenant", lambda row: row.headers.get("tenant")),
    ):
        found, without = counted(value)
        heading, rows = parts[kind]
        assert heading.startswith(f"{len(found)} {kind}s"), kind
        assert f"{without} dead letters without" in heading, kind
        assert dict(rows) == {name: found[name] for name, _ in rows}, kind
        assert len(rows) == min(10, len(found)), kind
        assert [n for _, n in rows] == sorted(found.values(), reverse=True)[:10], kind


def test_the_groups_lead_to_the_page(admin_client: Client) -> None:
    letters(3)
    groups = admin_client.get("/admin/django_txmsg/deadletter/").content.decode()
    assert f'href="{PAGE}?fingerprint={ERROR}"' in groups


def test_tenants_are_shown_only_if_a_header_is_named(
    admin_client: Client, settings: Any
) -> None:
    letters(3)
    settings.TXMSG = {**settings.TXMSG, "TENANT_HEADER": ""}
    assert shown(admin_client).keys() == {"key", "flow"}
    assert b"tenant" not in exported(admin_client)


def exported(client: Client) -> bytes:
    """Return the exported file."""
    answer = client.post(PAGE, {"fingerprint": ERROR})
    assert answer.status_code == 200
    content: bytes = b"".join(answer.streaming_content)  # type: ignore[attr-defined]
    return content


def test_the_export_has_each_open_letter_and_an_entry_in_the_audit(
    admin_client: Client,
) -> None:
    letters()

    rows = list(csv.DictReader(exported(admin_client).decode().splitlines()))

    found = {
        str(row.message_id): row
        for row in DeadLetter.objects.filter(fingerprint=ERROR, resolution="open")
    }
    assert {row["message_id"] for row in rows} == found.keys()
    for row in rows:
        letter = found[row["message_id"]]
        assert row["key"] == letter.headers.get(wire.KEY, "")
        assert row["tenant"] == letter.headers.get("tenant", "")
        assert row["flow"] == letter.correlation_id
        assert row["died"] == letter.created_at.isoformat()
        assert row["stage"] == letter.stage
    entry = AuditEntry.objects.get()
    assert (entry.by, entry.deed, entry.count) == ("admin", "export", 40)
    assert f"fingerprint {ERROR}" in entry.text


def test_what_the_mask_hides_is_neither_on_the_page_nor_in_the_file(
    admin_client: Client, settings: Any
) -> None:
    letters()
    settings.TXMSG = {**settings.TXMSG, "MASK": f"{__name__}.mask"}

    parts, file = shown(admin_client), exported(admin_client).decode()

    assert {value for value, _ in parts["key"][1]} == {"(masked)"}
    assert {value for value, _ in parts["tenant"][1]} == {"t***"}
    assert "key-" not in file
    assert "tenant-" not in file
    assert "t***" in file


def test_a_broken_mask_hides_keys_and_tenants(
    admin_client: Client, settings: Any
) -> None:
    letters(5)
    settings.TXMSG = {**settings.TXMSG, "MASK": f"{__name__}.broken_mask"}

    parts, file = shown(admin_client), exported(admin_client).decode()

    assert {v for kind in ("key", "tenant") for v, _ in parts[kind][1]} == {"(masked)"}
    assert "key-" not in file
    assert "tenant-" not in file


def test_a_spreadsheet_executes_no_cell(admin_client: Client) -> None:
    for key in ("=cmd|x", "+1", "-1", "@SUM(1)", "\t=1"):
        factories.DeadLetterFactory(fingerprint=ERROR, headers={wire.KEY: key})
    rows = csv.DictReader(exported(admin_client).decode().splitlines())
    assert all(row["key"].startswith("'") for row in rows)


@pytest.mark.parametrize("key", ["x;=cmd|x;y", "x\t@SUM(1)", "x\n+1", 'x; "=cmd|x'])
def test_a_spreadsheet_with_another_separator_executes_no_cell(
    admin_client: Client, key: str
) -> None:
    factories.DeadLetterFactory(fingerprint=ERROR, headers={wire.KEY: key})

    line = exported(admin_client).decode().partition("\r\n")[2]

    cells = [cell.lstrip(' "') for cell in re.split("[;\t\n]", line)]
    assert len(cells) > 1
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in cells)
    rows = csv.DictReader(exported(admin_client).decode().splitlines(keepends=True))
    assert next(rows)["key"].replace("'", "") == key


def test_the_export_needs_a_permission_of_its_own(
    somebody: Callable[..., Client],
) -> None:
    letters(3)
    viewer = somebody("view_deadletter", "redeliver_deadletter", "discard_deadletter")
    page = viewer.get(PAGE, {"fingerprint": ERROR})
    assert page.status_code == 200
    assert b"Export" not in page.content
    assert viewer.post(PAGE, {"fingerprint": ERROR}).status_code == 403
    assert somebody("export_deadletter").post(PAGE).status_code == 403
    assert not AuditEntry.objects.exists()

    exporter = somebody("view_deadletter", "export_deadletter")
    assert b"Export 3 as CSV" in exporter.get(PAGE, {"fingerprint": ERROR}).content
    exported(exporter)
    user = User.objects.latest("pk").username
    assert AuditEntry.objects.get().by == user
    # A link in a mail exports nothing.
    assert exporter.get(PAGE, {"fingerprint": ERROR})["Content-Type"].startswith(
        "text/html"
    )


@pytest.mark.parametrize(
    "query",
    [
        {"fingerprint": "none"},
        {"ids": "x"},
        {"since": "yesterday"},
        {"fingerprint": "\x00"},
    ],
)
def test_a_strange_filter_leads_back_to_the_list(
    admin_client: Client, query: dict[str, str]
) -> None:
    letters(3)
    for ask in (admin_client.get, admin_client.post):
        answer = ask(PAGE, query)
        assert answer.status_code == 302
    assert not AuditEntry.objects.exists()


def test_more_ids_than_can_be_selected_lead_back_to_the_list(
    admin_client: Client, operator: Client
) -> None:
    letters(3)
    ids = ",".join(map(str, range(1, 5002)))
    pages = [admin_client.post(PAGE, {"ids": ids}, follow=True)]
    confirm = {"kind": "redeliver", "ids": ids}
    pages.append(
        operator.get(PAGE.replace("affected", "confirm"), confirm, follow=True)
    )
    for page in pages:
        assert page.redirect_chain
        assert "5,001 dead letters are too many" in page.content.decode()
