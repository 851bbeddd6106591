"""An exception in a view rolls back the view's transaction, even if outer code turns
the exception into a response. The tests also check the cost of a view that uses no
database."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import threading
import time
import unittest
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import (
    DatabaseError,
    OperationalError,
    connection,
    connections,
    transaction,
)
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, Client, TestCase, override_settings
from django.urls import path

from django_txmsg import middleware, no_outbox, outbox_session, send_message
from django_txmsg.models import OutboxMessage, SessionRecord
from tests.app.models import Order
from tests.faults import wait_until
from tests.sampling import sample

from .conftest import MIDDLEWARE, control_messages, nothing_happened, txmsg
from .urls import order, place

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

HOOKS: list[str] = []


class Answers:
    """A middleware that turns every exception of a view into a response."""

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response: HttpResponse = self.get_response(request)
        return response

    def process_exception(
        self, request: HttpRequest, error: Exception
    ) -> HttpResponse | None:
        return JsonResponse({"error": str(error)}, status=int(request.GET["as"]))


def nothing(request: HttpRequest) -> HttpResponse:
    """Register a hook, but use no database."""
    transaction.on_commit(lambda: HOOKS.append("ran"))
    if "undo" in request.GET:
        transaction.set_rollback(True)
    return HttpResponse("nothing")


def read(request: HttpRequest) -> HttpResponse:
    """Execute one query that reads."""
    return JsonResponse({"orders": Order.objects.count()})


def writing_get(request: HttpRequest) -> HttpResponse:
    """Write to the database in a GET request."""
    Order.objects.count()
    place(request.GET["number"])
    if "fail" in request.GET:
        raise RuntimeError
    return HttpResponse(status=201)


RUNS: list[str] = []


def late_write(request: HttpRequest) -> HttpResponse:
    """Read, give another process time to write, and then write."""
    RUNS.append(request.GET["number"])
    before = Order.objects.count()
    with contextlib.suppress(TimeoutError):
        # While this view holds the lock, no other view writes.
        others_have_written(more_than=before, seconds=10 if RUNS == ["0"] else 0.2)
    place(request.GET["number"])
    return HttpResponse(status=201)


def late_template(request: HttpRequest) -> HttpResponse:
    """Like late_write(), but the template writes."""
    template = engines["django"].from_string("{{ write }}")
    return TemplateResponse(
        request, template, {"write": lambda: late_write(request).status_code}
    )


def closes_first(request: HttpRequest) -> HttpResponse:
    """Close all connections before the first query."""
    transaction.on_commit(lambda: HOOKS.append("ran"))
    connections.close_all()
    place("1")
    transaction.on_commit(raises)
    return HttpResponse(status=201)


def raises() -> None:
    raise RuntimeError("the hook failed")


LOCKED: list[str] = []


def locked_elsewhere(request: HttpRequest) -> HttpResponse:
    """Read from this database. Then fail to write to another database, which is
    locked."""
    assert not Order.objects.exists()
    other = connections["other"]
    with contextlib.closing(
        sqlite3.connect(str(other.settings_dict["NAME"]), isolation_level=None)
    ) as holder:
        holder.execute("BEGIN IMMEDIATE")
        try:
            with other.cursor() as cursor:
                cursor.execute("PRAGMA busy_timeout = 0")
                cursor.execute("DELETE FROM app_order")
        except OperationalError as error:
            LOCKED.append(str(error))
            raise
        finally:
            other.close()
    return HttpResponse(status=201)


def others_have_written(more_than: int, seconds: float) -> None:
    """Wait until another process commits. Raises TimeoutError after `seconds`."""
    other, until = connections["default"].copy(), time.monotonic() + seconds
    try:
        with other.cursor() as cursor:
            while time.monotonic() < until:
                cursor.execute("SELECT count(*) FROM app_order")
                if cursor.fetchone()[0] > more_than:
                    return
    finally:
        other.close()
    raise TimeoutError


def inner(request: HttpRequest) -> HttpResponse:
    """Place two orders, each in its own `atomic()` block. The first block is rolled
    back."""
    with contextlib.suppress(RuntimeError), transaction.atomic():
        place("lost")
        raise RuntimeError
    with transaction.atomic():
        place("kept")
    return HttpResponse(status=201)


def tries_again(request: HttpRequest) -> HttpResponse:
    """Catch the error that the database is unreachable, and query the database
    again."""
    with contextlib.suppress(DatabaseError):
        Order.objects.count()
    place("second")
    return HttpResponse(status=201)


def durable(request: HttpRequest) -> HttpResponse:
    """Open a durable transaction."""
    with transaction.atomic(durable=True):
        place("durable")
    return HttpResponse(status=201)


def rendered(request: HttpRequest) -> HttpResponse:
    """Return a response whose template fails when it is rendered after the view."""
    place("rendered")
    template = engines["django"].from_string("{% for one in broken %}{% endfor %}")
    return TemplateResponse(request, template, {"broken": _broken()})


def _broken() -> Iterator[str]:
    raise LookupError("in the template")
    yield ""


def two_databases(request: HttpRequest) -> HttpResponse:
    """Send one message from this database, and one from another."""
    place("here")
    with transaction.atomic(using="other"):
        send_message("http.orders", {}, using="other")
    return HttpResponse(status=201)


def api(request: HttpRequest) -> HttpResponse:
    """Catch the view's exceptions inside the middleware, as an API framework does."""
    try:
        place("half done")
        raise ValueError("amount is missing")
    except ValueError as error:
        return JsonResponse({"detail": str(error)}, status=400)


urlpatterns = [
    path("order", order),
    path("nothing", nothing),
    path("read", read),
    path("writing_get", writing_get),
    path("closes_first", closes_first),
    path("late_write", late_write),
    path("late_template", late_template),
    path("locked_elsewhere", locked_elsewhere),
    path("inner", inner),
    path("tries_again", tries_again),
    path("durable", durable),
    path("own_durable", no_outbox(_own := (lambda request: durable(request)))),
    path("rendered", rendered),
    path("two_databases", two_databases),
    path("api", api),
]


@pytest.fixture
def client(web: Any) -> Iterator[Client]:
    HOOKS.clear()
    RUNS.clear()
    with override_settings(ROOT_URLCONF=__name__):
        yield Client(raise_request_exception=False)


@pytest.fixture(params=[False, True], ids=["", "atomic_requests"])
def atomic_requests(request: pytest.FixtureRequest) -> Iterator[bool]:
    settings = connections.settings["default"]
    settings["ATOMIC_REQUESTS"] = request.param
    connection.settings_dict["ATOMIC_REQUESTS"] = request.param
    yield request.param
    settings["ATOMIC_REQUESTS"] = connection.settings_dict["ATOMIC_REQUESTS"] = False


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("then", ["raise", "not_found", "denied"])
def test_an_exception_that_is_answered_below_rolls_back(
    client, atomic_requests, then, status
) -> None:
    with override_settings(MIDDLEWARE=[*MIDDLEWARE, f"{__name__}.Answers"]):
        response = client.post(f"/order?number=1&then={then}&as={status}")
        assert response.status_code == status
        assert nothing_happened()
        post = async_to_sync(AsyncClient(raise_request_exception=False).post)
        assert post(f"/order?number=1&then={then}&as={status}").status_code == status
        assert nothing_happened()
        assert client.post("/order?number=1&as=400").status_code == 201
        assert (Order.objects.count(), control_messages()) == (1, 1)


def test_a_template_that_fails_rolls_back_too(client) -> None:
    assert client.post("/rendered").status_code == 500
    assert nothing_happened()


def test_a_template_that_fails_and_is_answered_below_rolls_back(client) -> None:
    with override_settings(MIDDLEWARE=[*MIDDLEWARE, f"{__name__}.Answers"]):
        assert client.post("/rendered?as=200").status_code == 200
        assert nothing_happened()
        post = async_to_sync(AsyncClient(raise_request_exception=False).post)
        assert post("/rendered?as=200").status_code == 200
        assert nothing_happened()


def test_views_are_left_as_they_are(client, atomic_requests) -> None:
    before = dict(vars(order))
    assert client.post("/order?number=1").status_code == 201
    assert vars(order) == before


@pytest.mark.parametrize("query", ["", "?undo"])
def test_a_view_without_queries_opens_no_connection(
    client, atomic_requests, query
) -> None:
    for method in (client.get, client.post):
        connection.close()
        assert method(f"/nothing{query}").content == b"nothing"
        assert connection.connection is None
    assert ([] if query else ["ran", "ran"]) == HOOKS
    assert not connection.in_atomic_block
    # The next request on this connection works as usual.
    assert client.post("/order?number=1").status_code == 201
    assert control_messages() == 1


def test_a_view_that_closes_before_it_connects_keeps_its_hooks(client, heard) -> None:
    connection.close()
    assert client.post("/closes_first").status_code == 201
    assert HOOKS == ["ran"]
    assert [one["outcome"] for one in heard["ended"]] == ["committed"]
    assert OutboxMessage.objects.count() == 2


@pytest.fixture
def writing() -> Iterator[None]:
    """Hold the write lock on another connection."""
    other = connections["default"].copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            yield
            cursor.execute("ROLLBACK")
    finally:
        other.close()


@pytest.mark.sqlite
@pytest.mark.parametrize("path", ["/nothing", "/read"])
def test_a_get_waits_for_no_writer(client, writing, path) -> None:
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 100")
    try:
        assert client.get(path).status_code == 200
    finally:
        connection.close()


@pytest.mark.sqlite
def test_a_tombstone_waits_for_no_writer(writing) -> None:
    """One thread checks the sessions of all control messages, so it does not wait as
    long as a view may."""
    session_id = uuid.uuid4()
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout = 60000")
        try:
            began = time.monotonic()
            with pytest.raises(OperationalError, match="locked"):
                SessionRecord.objects.give_up(session_id)
            assert time.monotonic() - began < 30
            cursor.execute("PRAGMA busy_timeout")
            assert cursor.fetchone() == (60000,)
        finally:
            connection.close()


@pytest.mark.sqlite
def test_a_post_that_reads_first_has_the_lock(client) -> None:
    """A POST takes the write lock before it reads, so no other connection can write
    before the POST does. A GET takes no lock when it reads."""
    seen: list[bool] = []

    def look(execute: Any, sql: str, *rest: Any) -> Any:
        result = execute(sql, *rest)
        if sql.startswith("SELECT"):
            other = connections["default"].copy()
            with other.cursor() as cursor:
                cursor.execute("PRAGMA busy_timeout = 0")
                with contextlib.suppress(OperationalError):
                    cursor.execute("BEGIN IMMEDIATE")
                    seen.append(True)
            other.close()
        return result

    with connection.execute_wrapper(look):
        assert client.post("/read").status_code == 200
        assert seen == []
        assert client.get("/read").status_code == 200
        assert seen == [True]


def test_a_get_that_writes_and_sends_does_both_or_neither(client) -> None:
    assert client.get("/writing_get?number=1&fail").status_code == 500
    assert nothing_happened()
    assert client.get("/writing_get?number=1").status_code == 201
    assert (Order.objects.count(), OutboxMessage.objects.count()) == (1, 2)
    assert control_messages() == 1


#: Commits one order after another, until its input ends.
WRITER = """
import select, sqlite3, sys
database = sqlite3.connect(sys.argv[1], timeout=20, isolation_level=None)
number = 0
while not select.select([sys.stdin], [], [], 0.01)[0]:
    number += 1
    database.execute(
        "INSERT INTO app_order (number, total, note) VALUES (?, 0, 'theirs')",
        [f"theirs {number}"],
    )
"""


@pytest.fixture
def writer() -> Iterator[None]:
    """Run another process that writes all the time."""
    name = connection.settings_dict["NAME"]
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(name)], stdin=subprocess.PIPE
    )
    try:
        wait_until(lambda: Order.objects.exists())
        yield
    finally:
        assert process.poll() is None
        process.communicate(timeout=60)


@pytest.mark.sqlite
@pytest.mark.parametrize(
    "served", [pytest.param("wsgi", marks=pytest.mark.matrix), "asgi"]
)
@pytest.mark.parametrize(
    "atomic_requests",
    [*sample([False, True])],
    ids=["", "atomic_requests"],
    indirect=True,
)
def test_a_get_that_writes_after_it_has_read_works_beside_a_writer(
    client, writer, atomic_requests, served
) -> None:
    middleware._writing.clear()
    get = client.get
    if served == "asgi":
        get = async_to_sync(AsyncClient(raise_request_exception=False).get)
    numbers = [str(number) for number in range(5)]
    for number in numbers:
        assert get(f"/late_write?number={number}").status_code == 201

    assert ["0", *numbers] == RUNS  # it is known from its first collision on
    ours = Order.objects.exclude(note="theirs").values_list("number", flat=True)
    assert sorted(ours) == numbers
    assert OutboxMessage.objects.count() == 2 * len(numbers)


@pytest.mark.sqlite
def test_a_template_that_writes_after_it_has_read_fails_once(client, writer) -> None:
    """A view's template reads, then writes. The first request fails and is not
    repeated. Later requests to the view take the write lock at their start, and
    succeed."""
    middleware._writing.clear()
    paths = [f"/late_template?number={number}" for number in range(3)]
    assert [client.get(path).status_code for path in paths] == [500, 200, 200]
    assert Order.objects.exclude(note="theirs").count() == 2
    assert OutboxMessage.objects.count() == 4


@pytest.mark.sqlite
def test_a_lock_of_another_database_is_not_the_session_s(client) -> None:
    """The view fails because another database is locked. The view is not run again,
    because this would not help, and would repeat its work in other databases."""
    LOCKED.clear()
    assert client.get("/locked_elsewhere").status_code == 500
    assert len(LOCKED) == 1


def test_blocks_inside_are_savepoints(client) -> None:
    connection.close()
    assert client.post("/inner").status_code == 201
    assert Order.objects.get().number == "kept"
    assert (OutboxMessage.objects.count(), control_messages()) == (2, 1)


def test_a_database_that_comes_back_in_mid_request(client, monkeypatch) -> None:
    connection.close()
    connect, refused = connection.get_new_connection, []

    def refuse_once(*arguments: Any) -> Any:
        if not refused:
            refused.append(True)
            raise OperationalError("connection refused")
        return connect(*arguments)

    monkeypatch.setattr(connection, "get_new_connection", refuse_once)
    assert client.post("/tries_again").status_code == 201
    assert Order.objects.get().number == "second"
    assert (OutboxMessage.objects.count(), control_messages()) == (2, 1)


def test_an_outbox_session_connects_only_when_a_message_is_stored() -> None:
    with override_settings(TXMSG=txmsg()):
        connection.close()
        with outbox_session():
            assert connection.in_atomic_block
        assert connection.connection is None
        with outbox_session():
            send_message("http.orders", {})
        assert OutboxMessage.objects.count() == control_messages() == 1


def test_a_durable_block_needs_a_view_without_the_outbox(client) -> None:
    assert client.post("/durable").status_code == 500
    assert nothing_happened()
    assert client.post("/own_durable").status_code == 201
    assert OutboxMessage.objects.count() == 2


def test_messages_on_another_database_send_a_control_message(client, caplog) -> None:
    assert client.post("/two_databases").status_code == 201
    assert OutboxMessage.objects.count() == 2
    assert OutboxMessage.objects.using("other").count() == 1
    assert "1 of its messages are on 'other'" in caplog.text


def test_framework_400_rolls_back_with_the_setting(client, web) -> None:
    with web(ROLLBACK_ON_4XX=True):
        assert client.post("/api").status_code == 400
    assert nothing_happened()
    # Told nothing, it takes the answer for a result.
    assert client.post("/api").status_code == 400
    assert Order.objects.count() == 1


def test_a_test_that_never_commits_sends_no_control_message(client, heard) -> None:
    """A request inside a TestCase sends no control message, because the rollback of the
    TestCase cannot undo what a broker has received."""

    class Case(TestCase):
        databases = frozenset({"default", "other"})

        def runTest(self) -> None:
            assert client.post("/order?number=1").status_code == 201
            assert OutboxMessage.objects.count() == 2

    result = unittest.TestResult()
    unittest.TestSuite([Case()]).run(result)
    assert result.testsRun == 1
    assert not result.errors + result.failures, result.errors + result.failures
    assert heard["sent"] == []


@pytest.mark.sqlite
def test_a_request_cancelled_while_it_begins_leaves_nothing_open(client) -> None:
    """A request is cancelled while it waits to begin its transaction. The next request
    in the same thread finds no open transaction."""
    other = connections["default"].copy()
    with other.cursor() as cursor:
        cursor.execute("BEGIN IMMEDIATE")

    async def scenario() -> None:
        ours = AsyncClient(raise_request_exception=False)
        task = asyncio.ensure_future(ours.post("/order?number=cancelled"))
        began = threading.Event()
        await asyncio.to_thread(began.wait, 0.5)
        task.cancel()
        await asyncio.to_thread(began.wait, 0.2)
        await asyncio.to_thread(other.connection.execute, "ROLLBACK")
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert not await sync_to_async(lambda: connection.in_atomic_block)()
        assert (await ours.post("/order?number=next")).status_code == 201

    try:
        async_to_sync(scenario)()
        with other.cursor() as cursor:
            cursor.execute("SELECT number FROM app_order")
            assert cursor.fetchall() == [("next",)]
    finally:
        other.close()


@pytest.mark.postgresql
def test_a_connection_that_died_between_requests_is_replaced() -> None:
    """With CONN_HEALTH_CHECKS, an outbox session checks its connection before the first
    query, as `atomic()` does. A dead connection is replaced."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()
    connection.health_check_enabled = True
    connection.health_check_done = False  # as at the beginning of a request
    another = connection.copy()
    with contextlib.closing(another), another.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
    with override_settings(TXMSG=txmsg()), outbox_session():
        place("one")
    assert Order.objects.get().number == "one"
