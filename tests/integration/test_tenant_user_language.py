"""The middlewares of the how-to *set tenant, user and language*, as a project uses
them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType
from typing import Any

import pytest
import sentry_sdk
from django.db import connection, transaction
from django.test import RequestFactory
from django.utils import timezone, translation
from sentry_sdk.transport import Transport

from django_txmsg import Refuse, send_message
from django_txmsg.envelope.message import Message
from django_txmsg.errors import ConfigurationError
from django_txmsg.models import DeadLetter, OutboxMessage
from tests.app.models import Effect
from tests.docs.pages import ROOT, blocks
from tests.running import committing, declared, put, ship, step, txmsg

pytestmark = committing

PAGE = ROOT / "docs" / "how-to" / "tenant-user-language.md"


@pytest.fixture
def messaging(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's `shop.messaging`."""
    name = "shop.messaging"
    # With a loader: tracebacks ask it for the lines of the page.
    spec = spec_from_loader(name, SourceFileLoader(name, str(PAGE)))
    assert spec
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "shop", ModuleType("shop"))
    monkeypatch.setitem(sys.modules, name, module)
    for block in blocks(PAGE):
        if block.language == "python" and "@stage" not in block.code:
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(PAGE), "exec"), module.__dict__)
    return module


def through(*names: str, **more: Any) -> Any:
    paths = [f"shop.messaging.{name}Middleware" for name in names]
    return txmsg(STAGE_MIDDLEWARE=paths, **more)


def send(stage: Any, body: object = None, **headers: str) -> None:
    with transaction.atomic():
        send_message(stage.destination, body, headers=headers)
    ship()


def test_the_settings_of_the_page_name_what_it_has(messaging: ModuleType) -> None:
    for path in messaging.TXMSG["STAGE_MIDDLEWARE"]:
        assert callable(getattr(messaging, path.rpartition(".")[2]))


def test_the_origin_travels_from_a_request_to_the_last_message(
    messaging: ModuleType,
) -> None:
    def handler(message: Message) -> None:
        messaging.send("tests.next", 1)

    class User:
        pk = 7

    def view(request: Any) -> None:
        with transaction.atomic():
            messaging.send(stage.destination, 1)

    request = RequestFactory().get("/", headers={"host": "north.example.org"})
    request.user = User()  # type: ignore[assignment]
    origin = {"tenant": "north", "user": "7", "language": "de"}
    with through("Origin"), declared(handler) as stage, translation.override("de"):
        token = messaging.origin.set({})
        messaging.OriginOfRequests(view)(request)
        messaging.origin.reset(token)
        ship()
        step(stage)

    assert OutboxMessage.objects.get(destination="tests.next").headers == origin


def test_each_message_has_its_language(messaging: ModuleType) -> None:
    found: list[tuple[str, str]] = []

    def handler(message: Message) -> None:
        zone = timezone.get_current_timezone_name()
        found.append((translation.gettext("Monday"), zone))

    with through("Language"), declared(handler) as stage:
        for language in ("de", "fr", ""):
            send(stage, **({"language": language} if language else {}))
        step(stage, times=3)

    days = ["Montag", "Lundi", "Monday"]
    assert [day.capitalize() for day, _ in found] == days
    assert {zone for _, zone in found} == {"Europe/Berlin"}


@pytest.fixture
def schemas(transactional_db: None) -> Iterator[None]:
    with connection.cursor() as cursor:
        for tenant in ("north", "south"):
            cursor.execute(f"CREATE SCHEMA {tenant}")
            cursor.execute(f"CREATE TABLE {tenant}.tests_ledger (entry text)")
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP SCHEMA north CASCADE; DROP SCHEMA south CASCADE")


def enter(message: Message) -> None:
    Effect.objects.create(name=str(message.body), message_id=str(message.id))
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO tests_ledger VALUES"
            " (%s || ' ' || current_setting('shop.user'))",
            [message.body],
        )
    send_message("tests.next", message.body)
    if message.body == "fails":
        raise LookupError


def ledger(tenant: str) -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT entry FROM {tenant}.tests_ledger ORDER BY 1")
        return [entry for (entry,) in cursor.fetchall()]


@pytest.mark.postgresql
@pytest.mark.usefixtures("schemas")
@pytest.mark.parametrize("batch", [1, 10])
def test_each_tenant_has_its_schema(messaging: ModuleType, batch: int) -> None:
    with through("Tenant"), declared(enter, batch=batch) as stage:
        for tenant in ("north", "south", "north"):
            send(stage, "a", tenant=tenant, user="7")
            send(stage, "fails", tenant=tenant, user="8")
        send(stage, "of none")  # there is no ledger in public
        send(stage, "z", tenant="south", user="9")
        step(stage, times=8 if batch == 1 else 1, parked=False)

    assert ledger("north") == ["a 7", "a 7"]
    assert ledger("south") == ["a 7", "z 9"]
    # Whatever the schema, the package's own tables are where they are.
    assert OutboxMessage.objects.filter(destination="tests.next").count() == 4
    assert Effect.objects.count() == 4
    with connection.cursor() as cursor:
        cursor.execute("SHOW search_path")
        assert "north" not in cursor.fetchone()[0]


@pytest.mark.postgresql
def test_tenant_without_a_schema_is_refused(messaging: ModuleType) -> None:
    """PostgreSQL ignores a schema in search_path that does not exist."""
    got: list[Message] = []
    with through("Tenant"), declared(got.append) as stage:
        send(stage, tenant="north")
        step(stage)

    assert DeadLetter.objects.get().reason == "refused"
    assert not got


@pytest.mark.postgresql
def test_unknown_tenant_is_refused(messaging: ModuleType) -> None:
    with through("Tenant"), declared(enter) as stage:
        send(stage, tenant='x", pg_catalog; --')
        step(stage)

    assert DeadLetter.objects.get().reason == "refused"


@pytest.mark.parametrize("mode", ["none", "broker_only"])
def test_a_stage_without_a_transaction_has_no_tenant(
    messaging: ModuleType, mode: str
) -> None:
    with (
        through("Tenant"),
        declared(enter, transaction=mode) as stage,
        pytest.raises(ConfigurationError, match="in no transaction"),
    ):
        step(stage)


class Heard(Transport):
    """Collects the errors that would go to Sentry."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def capture_envelope(self, envelope: Any) -> None:
        event = envelope.get_event()
        if event is not None:
            self.events.append(event)


@pytest.fixture
def sentry() -> Iterator[Heard]:
    heard = Heard()
    client = sentry_sdk.Client(
        dsn="https://key@sentry.invalid/1",
        transport=heard,
        default_integrations=False,
        auto_enabling_integrations=False,
        auto_session_tracking=False,
    )
    scope = sentry_sdk.get_global_scope()
    before = scope.client
    scope.set_client(client)
    yield heard
    scope.set_client(before)
    client.close()


def test_an_error_is_reported_with_its_message(
    messaging: ModuleType, sentry: Heard
) -> None:
    def handler(message: Message) -> None:
        if message.body == "refuse":
            raise Refuse("a verdict")
        if message.body == "fail":
            raise LookupError("no stock")

    with through("Report"), declared(handler) as stage:
        for body in (b'"well"', b'"refuse"'):
            put(stage.destination, body)
        failing = put(stage.destination, b'"fail"')
        step(stage, times=3, parked=False)

    (event,) = sentry.events
    assert event["exception"]["values"][-1]["value"] == "no stock"
    assert event["transaction"] == f"stage {stage.name}"
    assert event["tags"] == {"message": str(failing), "attempt": 1}


@pytest.mark.postgresql
def test_errors_of_the_commit_are_reported_too(
    messaging: ModuleType, sentry: Heard
) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE tests_once (name text UNIQUE DEFERRABLE INITIALLY DEFERRED)"
        )

    def handler(message: Message) -> None:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO tests_once VALUES ('it'), ('it')")

    try:
        with through("Report"), declared(handler) as stage:
            put(stage.destination)
            step(stage)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE tests_once")

    (event,) = sentry.events
    assert event["exception"]["values"][-1]["type"] == "IntegrityError"
