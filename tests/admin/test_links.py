"""The admin shows a user only links and buttons that the user may follow."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import parse_qsl, urljoin, urlsplit

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.db.models import AutoField, BigAutoField
from django.test import Client
from django.urls import resolve
from django.utils import timezone

from django_txmsg import every, stages
from django_txmsg.models import FlowStep, IdempotencyKey, OutboxMessage, Run
from django_txmsg.spark.models import Finding
from tests import factories
from tests.forgetting import forget_recurring
from tests.running import txmsg
from tests.trips import trips

from . import shop

pytestmark = pytest.mark.django_db(databases=["default", "other"])

INDEX = "/admin/django_txmsg/"


def permissions() -> list[str]:
    """Return the permissions that allow something in the admin, and the permissions to
    change rows, which nobody can do there."""
    return [
        f"{model._meta.app_label}.{codename}"
        for model in apps.get_models()
        if model._meta.app_label in ("django_txmsg", "txmsg_spark")
        if admin.site.is_registered(model)
        for codename in (
            f"view_{model._meta.model_name}",
            f"change_{model._meta.model_name}",
            *(name for name, _ in model._meta.permissions),
        )
    ]


@pytest.fixture
def starts() -> Iterator[list[str]]:
    """Store rows for every page, and return the URLs at which a user may begin."""
    every("0 3 * * *", "reports.nightly", {})
    for stage in shop.STAGES:
        stages.register(stage)
    with txmsg(EDIT_DEAD_LETTERS=True), trips():
        yield [INDEX, f"{INDEX}auditentry/may-i/", *rows()]
    for stage in shop.STAGES:
        stages.unregister(stage.name)
    forget_recurring("reports.nightly")


def rows() -> list[str]:
    shop.open_shop(4)
    dead = shop.trouble(2)
    shop.audited()
    factories.DeadLetterFactory(discarded=True)
    factories.StageStateFactory(stage="payments.charge")
    factories.InboxMessageFactory(
        parked=True, stage="shipping.send", key="k", waits_for=uuid.uuid4()
    )
    factories.BulkOperationFactory(skipped=1, skipped_why={str(dead.pk): "no"})
    run = Run.objects.create(
        run_id=uuid.uuid4(), first_run=uuid.uuid4(), service="tests", flow="acts.trip",
        version=1, step="paid", turn=uuid.uuid4(), waits_for="answer",
        state=json.dumps({"number": 1, "said": []}), request_id=dead.message_id,
    )  # fmt: skip
    FlowStep.objects.create(
        run=run, step="start", message_id=dead.message_id, version=1, state="{}"
    )
    factories.BulkOperationFactory(
        kind="go-back", skipped=1, skipped_why={str(run.pk): "no"}
    )
    IdempotencyKey.objects.create(key="a", caller="b")
    Finding.objects.create(
        id=uuid.uuid4(), service="tests", verdict="never_received",
        found_at=timezone.now(), seen_at=timezone.now(), message_id=dead.message_id,
        destination="a",
    )  # fmt: skip
    stored = OutboxMessage.objects.filter(dispatched_at=None)[0]
    messages = [dead.message_id, stored.message_id]
    return [f"{INDEX}outboxmessage/{one}/" for one in messages]


@pytest.fixture
def many_rows(db: None) -> None:
    """Let ids begin at 12000, as in a database that has stored many rows."""
    with connection.cursor() as cursor:
        for model in apps.get_models():
            if not isinstance(model._meta.pk, AutoField | BigAutoField):
                continue
            table = model._meta.db_table
            if connection.vendor == "sqlite":
                sql = "INSERT INTO sqlite_sequence (name, seq) VALUES (%s, 12000)"
            else:
                sql = "SELECT setval(pg_get_serial_sequence(%s, 'id'), 12000)"
            cursor.execute(sql, [table])


class Page(HTMLParser):
    """The links of a page, and the buttons that send a form, with the form's values."""

    def __init__(self, url: str, text: str) -> None:
        super().__init__()
        self.url, self.links, self.buttons = (
            url,
            set[str](),
            dict[str, dict[str, str]](),
        )
        self._action, self._values = "", dict[str, str]()
        self.feed(text)

    def handle_starttag(self, tag: str, found: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in found}
        if tag == "a" and not given.get("href", "#").startswith("#"):
            self.links.add(urljoin(self.url, given["href"]))
        elif tag == "form":
            is_post = given.get("method") == "post"
            self._action = given.get("action", "") if is_post else "none"
            self._values = {}
        elif given.get("type") == "submit" or "formaction" in given:
            action = given.get("formaction", self._action)
            if action != "none" and "disabled" not in given:
                self.buttons[urljoin(self.url, action)] = self._values
        if tag in ("input", "textarea", "select") and "name" in given:
            self._values[given["name"]] = given.get("value", "")


def kind(url: str) -> tuple[object, ...]:
    """Return the view of a URL, its action, and the names of its parameters."""
    parts = urlsplit(url)
    found, query = resolve(parts.path), parse_qsl(parts.query)
    names = sorted({name for name, _ in query})
    return found.view_name, found.kwargs.get("name"), *names, dict(query).get("kind")


#: Django's own code serves all other pages: log-out, password.
OURS = re.compile(r"/admin/((django_txmsg|txmsg_spark)/.*)?$")
Button = tuple[str, dict[str, str], str]


def walk(client: Client, starts: list[str]) -> tuple[set[str], list[Button]]:
    """Open all pages that links lead to, one of each kind. Return the links that were
    refused, each with its page, and the buttons: URL, values and page."""
    todo, seen = set(starts), set[tuple[object, ...]]()
    buttons: dict[tuple[object, ...], Button] = {}
    linked: dict[str, str] = {}
    refused: dict[str, int] = {}
    while todo:
        url = todo.pop()
        answer = client.get(url, follow=True)
        if answer.status_code >= 400:
            refused[url] = answer.status_code
        elif "text/html" in answer["Content-Type"]:
            page = Page(url, answer.content.decode())
            for link in page.links:
                linked.setdefault(link, url)
                if OURS.match(link) and kind(link) not in seen:
                    seen.add(kind(link))
                    todo.add(link)
            for to, values in page.buttons.items():
                if OURS.match(to):
                    buttons.setdefault((*kind(to), *values), (to, values, url))
    found = {
        f"{refused[url]}: {url} on {linked[url]}" for url in refused & linked.keys()
    }
    return found, list(buttons.values())


@pytest.mark.parametrize("permission", permissions())
def test_one_permission_alone_shows_no_link_that_is_refused(
    permission: str, starts: list[str], client: Client
) -> None:
    label, _, codename = permission.partition(".")
    user = User.objects.create_user("ann", is_staff=True)
    user.user_permissions.add(
        Permission.objects.get(content_type__app_label=label, codename=codename)
    )
    client.force_login(user)

    refused, buttons = walk(client, starts)

    assert refused == set()
    for url, values, page in buttons:
        answer = client.post(url, values, follow=True)
        assert answer.status_code == 200, f"the button {url} on {page}"


def test_all_permissions_together_lead_to_all_pages(
    starts: list[str], admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the test above could pass because the walk finds nothing."""
    opened: set[object] = set()
    given = admin_client.request

    def request(**environ: Any) -> Any:
        opened.add(resolve(environ["PATH_INFO"]).url_name)
        return given(**environ)

    monkeypatch.setattr(admin_client, "request", request)
    refused, buttons = walk(admin_client, starts)

    assert refused == set()
    pages = "message", "confirm", "affected", "running", "contract", "changes", "copy"
    assert opened >= {f"django_txmsg_{one}" for one in pages}
    pressed = {resolve(urlsplit(url).path).url_name for url, _, _ in buttons}
    acts = "stage_pause", "cancel", "note", "run_act", "bulk_cancel"
    assert pressed >= {f"django_txmsg_{one}" for one in acts}


class Numbers(HTMLParser):
    """The attributes of a page that a browser or our code reads as numbers, and that
    have a localized number. `read` counts all such attributes."""

    READ = frozenset(
        (
            *("href", "action", "formaction", "value", "id", "for", "min", "max", "d"),
            *("x", "y", "x1", "x2", "y1", "y2", "width", "height", "viewbox"),
        )
    )
    LOCALIZED = re.compile(r"\d,\d|(?<![\d.])[1-9]\d{0,2}(\.\d{3})+(?![\d.])")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.read, self.localized = 0, list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, found: list[tuple[str, str | None]]) -> None:
        if tag == "path" and "class" not in dict(found):
            return  # an icon of Django's
        for name, value in found:
            if name in self.READ:
                self.read += 1
                if self.LOCALIZED.search(value or ""):
                    self.localized.append(f"<{tag} {name}={value!r}>")


@pytest.mark.usefixtures("many_rows")
def test_no_attribute_has_a_localized_number(
    starts: list[str], admin_client: Client, monkeypatch: pytest.MonkeyPatch,
    settings: Any,
) -> None:  # fmt: skip
    """A browser does not draw y="44,0", and no view finds the id 12.345."""
    settings.LANGUAGE_CODE, settings.USE_THOUSAND_SEPARATOR = "de", True
    factories.FailureNoteFactory(
        fingerprint=shop.TIMEOUT[2], muted=True, muted_above=2000
    )
    factories.WorkerFactory(kind="relay", pid=20602)
    pages: dict[str, str] = {}
    given = admin_client.request

    def request(**environ: Any) -> Any:
        answer = given(**environ)
        if "text/html" in answer.get("Content-Type", ""):
            pages[environ["PATH_INFO"]] = answer.content.decode()
        return answer

    monkeypatch.setattr(admin_client, "request", request)
    walk(admin_client, starts)

    found = {url: Numbers(text) for url, text in pages.items()}
    assert {url: one.localized for url, one in found.items() if one.localized} == {}
    assert sum(one.read for one in found.values()) > 1000
    assert f"{INDEX}run/12001/change/" in pages
    assert "20602" in pages[INDEX]
    assert not [url for url, text in pages.items() if "20.602" in text]
