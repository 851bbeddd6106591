"""OutboxMiddleware in one process: which requests have a transaction, and which of
these commit or roll back."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.admin.models import LogEntry
from django.core.exceptions import PermissionDenied
from django.db import OperationalError, connection, connections, transaction
from django.test import AsyncClient, Client
from django.test.utils import CaptureQueriesContext

from django_txmsg import signals
from django_txmsg.errors import SwallowedDatabaseError, TransactionRequired
from django_txmsg.models import OutboxMessage, QueueMessage, SessionRecord
from django_txmsg.sending.scope import current_scope
from tests.app.models import Order

from .conftest import control_messages, nothing_happened

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture
def client(web) -> Client:
    """A test client that gets a response 500 instead of the view's exception."""
    return Client(raise_request_exception=False)


def test_data_and_messages_are_stored_together(client, heard) -> None:
    response = client.post("/order?number=1")

    assert response.status_code == 201
    assert Order.objects.get().number == "1"
    stored = OutboxMessage.objects.order_by("pk")
    assert [str(row.message_id) for row in stored] == response.json()["ids"]
    assert len({row.session_id for row in stored}) == 1
    assert control_messages() == 1
    (sent,) = heard["sent"]
    assert sent["session_id"] == stored[0].session_id
    assert sent["outcome"] == "sent"
    (ended,) = heard["ended"]
    assert (ended["outcome"], ended["stored"]) == ("committed", 2)


def test_the_control_message_says_what_the_receiver_needs(client) -> None:
    client.post("/order?number=1&then=metadata")

    message = QueueMessage.objects.using("other").get()
    session = OutboxMessage.objects.values_list("session_id", flat=True).first()
    assert bytes(message.body) == b""
    assert message.headers["txmsg-session"] == str(session)
    assert message.headers["txmsg-using"] == "default"
    assert message.headers["txmsg-service"] == "web"
    assert message.headers["txmsg-signature"]
    assert message.headers["tenant"] == "north"
    told = "transaction" if connection.vendor == "postgresql" else "delay"
    assert message.headers["txmsg-oracle"] == told


def test_control_message_leaves_before_the_commit(client) -> None:
    seen = []

    def look(**_: object) -> None:
        other = connections["default"].copy()
        try:
            with other.cursor() as cursor:
                cursor.execute("SELECT count(*) FROM app_order")
                seen.append((control_messages(), cursor.fetchone()[0]))
        finally:
            other.close()

    signals.control_message_sent.connect(look)
    try:
        client.post("/order?number=1")
    finally:
        signals.control_message_sent.disconnect(look)
    assert seen == [(1, 0)]


@pytest.mark.parametrize("path", ["/read", "/write?number=1"])
def test_without_messages_there_is_no_control_message(client, path) -> None:
    assert client.post(path).status_code in (200, 201)

    assert control_messages() == 0
    assert not SessionRecord.objects.exists()


def test_messages_of_a_rolled_back_savepoint_do_not_leave(client) -> None:
    client.post("/rolled_back_part")

    assert Order.objects.get().number == "kept"
    assert {row.session_id for row in OutboxMessage.objects.all()} != {None}
    assert OutboxMessage.objects.count() == 2
    assert control_messages() == 1


@pytest.mark.parametrize(
    ("then", "status"),
    [("raise", 500), ("not_found", 404), ("denied", 403), ("500", 500), ("503", 503)],
)
def test_an_exception_or_a_response_of_500_rolls_back(
    client, heard, then, status
) -> None:
    response = client.post(f"/order?number=1&then={then}")

    assert response.status_code == status
    assert nothing_happened()
    assert [one["outcome"] for one in heard["ended"]] == ["rolled_back"]


@pytest.mark.parametrize("strict", [False, True])
def test_an_exception_of_a_middleware_below_is_a_response(
    client, web, settings, strict: bool
) -> None:
    """Django turns such an exception into a response of status 403 before
    OutboxMiddleware sees it."""
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, f"{__name__}.forbid"]
    with web(ROLLBACK_ON_4XX=strict):
        assert client.post("/order?number=1").status_code == 403
    assert Order.objects.count() == OutboxMessage.objects.count() / 2 == 1 - strict


def forbid(get_response):
    def middleware(request):
        get_response(request)
        raise PermissionDenied

    return middleware


def test_returned_4xx_commits_by_default(client, web) -> None:
    assert client.post("/order?number=1&then=409").status_code == 409
    assert Order.objects.count() == 1

    with web(ROLLBACK_ON_4XX=True):
        assert client.post("/order?number=2&then=409").status_code == 409
    assert Order.objects.count() == 1
    assert control_messages() == 1


def test_a_rollback_that_was_asked_for_keeps_the_response(client) -> None:
    assert client.post("/order?number=1&then=roll_back").status_code == 201

    assert nothing_happened()


@pytest.mark.parametrize("then", ["swallow_save", "swallow"])
def test_a_swallowed_error_is_no_success(client, then) -> None:
    if then == "swallow" and connection.vendor != "postgresql":
        # There a failed SELECT spoils nothing, and the order is simply stored.
        assert client.post(f"/order?number=1&then={then}").status_code == 201
        assert Order.objects.count() == 1
        return
    client.raise_request_exception = True
    with pytest.raises(SwallowedDatabaseError, match="nothing was stored"):
        client.post(f"/order?number=1&then={then}")

    assert nothing_happened()


def test_a_commit_that_fails_is_a_500_and_changes_nothing(client, heard) -> None:
    assert client.post("/order?number=1&then=bad_commit").status_code == 500

    assert not Order.objects.exists()
    assert not OutboxMessage.objects.exists()
    assert not LogEntry.objects.exists()
    assert [one["outcome"] for one in heard["ended"]] == ["failed"]
    # The next request on this connection is not affected.
    assert client.post("/order?number=2").status_code == 201


def test_without_a_database_it_is_a_500_and_the_next_one_is_served(
    client, heard, monkeypatch
) -> None:
    connection.close()
    with monkeypatch.context() as outage:

        def refuse(*_: object) -> None:
            raise OperationalError("connection refused")

        outage.setattr(connection, "get_new_connection", refuse)
        assert client.post("/order?number=1").status_code == 500

    assert nothing_happened()
    assert current_scope() is None
    assert client.post("/order?number=2").status_code == 201
    outcomes = [one["outcome"] for one in heard["ended"]]
    assert outcomes == ["rolled_back", "committed"]


def test_the_error_of_a_transaction_that_cannot_begin_is_raised(web) -> None:
    def refuse(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("SAVEPOINT"):
            raise OperationalError("the connection is lost")
        return execute(sql, *rest)

    with (
        pytest.raises(OperationalError, match="the connection is lost"),
        transaction.atomic(),  # the session is a savepoint in it
        connection.execute_wrapper(refuse),
    ):
        Client().post("/order?number=1")
    assert nothing_happened()
    assert current_scope() is None


def test_a_hook_that_raises_after_the_commit_is_no_failure(client, caplog) -> None:
    assert client.post("/order?number=1&then=bad_hook").status_code == 201

    assert Order.objects.count() == 1
    assert "the hook failed" in caplog.text


@pytest.mark.parametrize("path", ["/without", "/non_atomic"])
def test_views_that_are_left_alone(client, path) -> None:
    assert client.get(path).json() == {"atomic": False}


@pytest.fixture
def atomic_requests() -> None:
    settings = connections.settings["default"]
    settings["ATOMIC_REQUESTS"] = connection.settings_dict["ATOMIC_REQUESTS"] = True
    yield
    settings["ATOMIC_REQUESTS"] = connection.settings_dict["ATOMIC_REQUESTS"] = False


def test_atomic_requests_is_not_doubled(client, atomic_requests, settings) -> None:
    with CaptureQueriesContext(connection) as queries:
        assert client.get("/atomic").json() == {"depth": 1}
    assert not [one for one in queries.captured_queries if "SAVEPOINT" in one["sql"]]
    # What Django promised is kept for those views that we leave alone, ...
    assert client.get("/non_atomic").json() == {"atomic": False}
    assert client.get("/without").json() == {"atomic": True}
    # ... and for all where the middleware is not.
    settings.MIDDLEWARE = []
    assert Client().get("/atomic").json() == {"depth": 1}


def test_atomic_requests_rolls_back_with_the_session(client, atomic_requests) -> None:
    assert client.post("/order?number=1&then=raise").status_code == 500
    assert nothing_happened()
    assert client.post("/order?number=1").status_code == 201
    assert control_messages() == 1


def test_control_messages_can_be_switched_off(client, web) -> None:
    with web(CONTROL_MESSAGE="off"):
        assert client.post("/order?number=1").status_code == 201
    assert OutboxMessage.objects.count() == 2
    assert control_messages() == 0


def test_a_stream_commits_before_it_begins(client) -> None:
    response = client.post("/stream")

    assert response.status_code == 201
    assert OutboxMessage.objects.count() == 2
    with pytest.raises(TransactionRequired, match="sync_to_async"):
        list(response.streaming_content)


@pytest.fixture
def async_client(web) -> AsyncClient:
    return AsyncClient(raise_request_exception=False)


def test_a_sync_view_under_asgi_gets_the_session(async_client) -> None:
    post = async_to_sync(async_client.post)

    assert post("/order?number=1").status_code == 201
    assert control_messages() == 1
    assert post("/order?number=2&then=raise").status_code == 500
    assert Order.objects.count() == 1
    assert current_scope() is None


def test_async_view_gets_an_error_with_advice(async_client) -> None:
    post = async_to_sync(async_client.post)

    async_client.raise_request_exception = True
    with pytest.raises(TransactionRequired, match="sync_to_async"):
        post("/async")
    assert post("/async_right").status_code == 201
    assert OutboxMessage.objects.count() == 2
    assert control_messages() == 1


def test_async_view_under_wsgi_gets_the_error_too(client) -> None:
    client.raise_request_exception = True
    with pytest.raises(TransactionRequired, match="sync_to_async"):
        client.post("/async")
