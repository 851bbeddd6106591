"""A request that is repeated with the same Idempotency-Key has no second effect, and
gets the same response."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connections
from django.http import HttpRequest
from django.test import Client, override_settings

from django_txmsg import signals
from django_txmsg.errors import SwallowedDatabaseError
from django_txmsg.http_outbox import idempotency
from django_txmsg.models import IdempotencyKey, OutboxMessage
from tests.app.models import Order

from .conftest import MIDDLEWARE, txmsg

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@pytest.fixture(autouse=True)
def settings_in_force() -> Iterator[None]:
    with override_settings(
        ROOT_URLCONF="tests.integration.http.urls",
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            *MIDDLEWARE,
        ],
        TXMSG=txmsg(IDEMPOTENCY=True),
    ):
        yield


#: Who sends requests, unless a test says otherwise.
ME = {"Authorization": "Bearer mine"}


def post(key: str | None, client: Client | None = None, **form: Any) -> Any:
    """Place an order with this idempotency key."""
    client = client or Client(raise_request_exception=False, headers=ME)
    headers = {} if key is None else {"Idempotency-Key": key}
    then = form.pop("then", "")
    return client.post(f"/order?then={then}", {"number": "1", **form}, headers=headers)


def test_a_repeated_request_gets_the_stored_answer() -> None:
    first = post("a-key")
    second = post("a-key")

    assert (first.status_code, second.status_code) == (201, 201)
    assert second.content == first.content
    assert second["Content-Type"] == first["Content-Type"]
    assert second["Idempotency-Replayed"] == "true"
    assert "Idempotency-Replayed" not in first
    assert Order.objects.count() == 1
    assert OutboxMessage.objects.count() == 2


@pytest.mark.parametrize("key", ['"a-key"', "a-key", ' "a-key" '])
def test_the_key_may_be_quoted_or_bare(key) -> None:
    assert post("a-key").status_code == 201
    assert post(key)["Idempotency-Replayed"] == "true"


@pytest.mark.parametrize("key", ["", '""', "x" * 256, '"open', "tab\there", "ümlaut"])
def test_an_unusable_key_is_refused(key) -> None:
    response = post(key)
    assert response.status_code == 400
    assert response["Content-Type"] == "application/problem+json"
    assert response.json()["status"] == 400
    assert not Order.objects.exists()


def test_another_request_under_the_same_key_is_refused() -> None:
    assert post("a-key").status_code == 201
    for other in ({"number": "2"}, {"then": "409"}):
        response = post("a-key", **other)
        assert response.status_code == 422
        assert response["Content-Type"] == "application/problem+json"
    assert Order.objects.count() == 1
    assert IdempotencyKey.objects.count() == 1


def test_other_keys_and_requests_without_one_are_other_requests() -> None:
    assert post("a-key").status_code == 201
    assert post("b-key", number="2").status_code == 201
    assert post(None, number="3").status_code == 201
    assert Order.objects.count() == 3


def test_safe_requests_need_no_key() -> None:
    for _ in range(2):
        response = Client().get("/read", headers={"Idempotency-Key": "a-key"})
        assert "Idempotency-Replayed" not in response
    assert not IdempotencyKey.objects.exists()


def test_keys_of_different_callers_do_not_meet() -> None:
    clients = []
    for name in ("ann", "bob"):
        client = Client()
        client.force_login(User.objects.create_user(name))
        clients.append(client)
    answers = [
        post("a-key", client, number=str(number))
        for number, client in enumerate(clients)
    ]
    assert [one.status_code for one in answers] == [201, 201]
    for client, before in zip(clients, answers, strict=True):
        number = before.json()["number"]
        assert post("a-key", client, number=number).content == before.content
    tokens = [Client(headers={"Authorization": f"Bearer {one}"}) for one in "xy"]
    for number, client in enumerate(tokens):
        assert post("a-key", client, number=f"t{number}").status_code == 201
    assert Order.objects.count() == 4


def test_rolled_back_request_frees_its_key() -> None:
    assert post("a-key", then="500").status_code == 500
    assert post("a-key", then="raise").status_code == 500
    assert not IdempotencyKey.objects.exists()
    assert post("a-key").status_code == 201
    assert post("a-key")["Idempotency-Replayed"] == "true"
    assert Order.objects.count() == 1


def test_a_refusal_is_a_result_too() -> None:
    assert post("a-key", then="409").status_code == 409
    again = post("a-key", then="409")
    assert (again.status_code, again["Idempotency-Replayed"]) == (409, "true")


def test_a_stream_is_not_repeated() -> None:
    key = {"Idempotency-Key": "a-key", **ME}
    first = Client().post("/stream", headers=key)
    assert first.status_code == 201
    assert next(iter(first.streaming_content)) == b"first\n"
    assert Client().post("/stream", headers=key).status_code == 409
    assert Order.objects.count() == 1


def test_uploads_are_compared_by_their_content() -> None:
    def upload(content: bytes) -> Any:
        return post("a-key", file=SimpleUploadedFile("f.bin", content))

    assert upload(b"x" * 3_000_000).status_code == 201
    # Their boundaries differ, and the content does not.
    assert upload(b"x" * 3_000_000)["Idempotency-Replayed"] == "true"
    assert upload(b"x" * 2_999_999 + b"y").status_code == 422


@pytest.mark.postgresql
def test_concurrent_request_gets_a_409() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold(**_: object) -> None:
        entered.set()
        assert leave.wait(30)

    def first() -> Any:
        try:
            return post("a-key")
        finally:
            connections.close_all()

    signals.control_message_sent.connect(hold)
    try:
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(first)
            assert entered.wait(30)
            concurrent = post("a-key")
            other = Client().get("/read")
            leave.set()
            assert slow.result(30).status_code == 201
    finally:
        leave.set()
        signals.control_message_sent.disconnect(hold)
    assert concurrent.status_code == 409
    assert concurrent["Retry-After"] == "1"
    assert other.status_code == 200
    assert post("a-key")["Idempotency-Replayed"] == "true"
    assert Order.objects.count() == 1


def test_many_at_once_have_one_effect() -> None:
    def one(_: int) -> int:
        try:
            return int(post("a-key").status_code)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(one, range(12)))
    assert set(statuses) <= {201, 409}
    assert 201 in statuses
    assert Order.objects.count() == 1
    assert OutboxMessage.objects.count() == 2


def by_api_key(request: HttpRequest) -> str | None:
    """Return the caller of a request: its X-Api-Key header."""
    return request.headers.get("X-Api-Key")


def test_stored_response_needs_a_certain_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two requests have an Idempotency-Key, but nothing by which the package can
    identify the caller. The package could send the stored response of one caller to
    another caller. So it refuses both requests, and logs once which setting is
    needed."""
    idempotency._log_unknown_caller.cache_clear()
    for headers in ({"X-Api-Key": "alice"}, {"Cookie": "sessionid=" + "m" * 32}):
        client = Client(headers=headers)
        response = post("a-key", client)
        assert response.status_code == 400
        assert "caller" in response.json()["title"]
    assert not Order.objects.exists()
    assert not IdempotencyKey.objects.exists()
    assert caplog.text.count('TXMSG["HTTP"]["IDEMPOTENCY_CALLER"]') == 1
    # Without a key they are served as before.
    assert post(None, Client(headers={"X-Api-Key": "alice"})).status_code == 201


def test_a_project_says_who_its_callers_are() -> None:
    named = txmsg(IDEMPOTENCY=True, IDEMPOTENCY_CALLER=f"{__name__}.by_api_key")
    alice, bob = (Client(headers={"X-Api-Key": one}) for one in ("alice", "bob"))
    with override_settings(TXMSG=named):
        assert post("a-key", Client(headers=ME)).status_code == 400
        assert post("a-key", alice).status_code == 201
        assert post("a-key", alice)["Idempotency-Replayed"] == "true"
        assert "Idempotency-Replayed" not in post("a-key", bob, number="2")
    assert Order.objects.count() == 2


def test_a_session_with_data_identifies_a_caller() -> None:
    client = Client()
    session = client.session
    session["cart"] = 7
    session.save()
    assert post("a-key", client).status_code == 201
    assert post("a-key", client)["Idempotency-Replayed"] == "true"


def test_the_same_address_on_another_host_is_another_request() -> None:
    assert (
        post("a-key", Client(headers=ME, SERVER_NAME="north.test")).status_code == 201
    )
    other = post("a-key", Client(headers=ME, SERVER_NAME="south.test"))
    assert other.status_code == 422


@pytest.mark.parametrize("status", ["401", "403", "429"])
def test_an_answer_that_asks_for_another_try_is_not_kept(status) -> None:
    assert post("a-key", then=status).status_code == int(status)
    assert not IdempotencyKey.objects.exists()
    assert not Order.objects.exists()
    assert post("a-key").status_code == 201
    assert post("a-key")["Idempotency-Replayed"] == "true"


def test_a_response_that_is_too_large_is_not_kept(monkeypatch) -> None:
    monkeypatch.setattr(
        "django_txmsg.http_outbox.idempotency.MAX_KEPT", 10, raising=False
    )
    assert post("a-key").status_code == 201
    assert IdempotencyKey.objects.get().body is None
    assert post("a-key").status_code == 409
    assert Order.objects.count() == 1


def test_a_body_too_large_to_compare_is_refused() -> None:
    def send(headers: dict[str, str]) -> Any:
        return Client().post(
            "/order?number=1",
            b"x" * 3_000_000,
            content_type="application/octet-stream",
            headers=headers,
        )

    assert send({"Idempotency-Key": "a-key", **ME}).status_code == 413
    assert not Order.objects.exists()
    assert send(ME).status_code == 201


@pytest.mark.parametrize("path", ["/without", "/non_atomic", "/async_right"])
def test_a_view_without_a_session_says_that_it_keeps_no_keys(path) -> None:
    response = Client().post(path, headers={"Idempotency-Key": "a-key", **ME})
    assert response.status_code == 400
    assert "not supported" in response.json()["title"]
    assert not Order.objects.exists()
    assert Client().get("/without", headers={"Idempotency-Key": "a"}).status_code == 200


def test_idempotency_is_off_by_default() -> None:
    with override_settings(TXMSG=txmsg()):
        assert post("a-key").status_code == 201
        assert post("a-key", number="2").status_code == 201
    assert not IdempotencyKey.objects.exists()


def test_a_key_is_stored_with_the_session_of_its_messages() -> None:
    """The stored response of a key has the session id of the request's messages. With
    this id, the pipeline erases the response together with the messages."""
    post("a-key")

    assert IdempotencyKey.objects.get().session_id is not None
    assert set(IdempotencyKey.objects.values_list("session_id")) == set(
        OutboxMessage.objects.values_list("session_id")
    )


def test_a_rollback_that_was_asked_for_keeps_the_response_and_frees_its_key() -> None:
    assert post("a-key", then="roll_back").status_code == 201
    assert not Order.objects.exists()
    assert not IdempotencyKey.objects.exists()
    assert post("a-key").status_code == 201
    assert Order.objects.count() == 1


def test_a_swallowed_error_is_named() -> None:
    with pytest.raises(SwallowedDatabaseError, match="nothing was stored"):
        post("a-key", Client(headers=ME), then="swallow_save")
    assert not IdempotencyKey.objects.exists()
