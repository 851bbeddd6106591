"""Redelivering an edited copy of a dead letter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from django_txmsg import wire
from django_txmsg.models import DeadLetter, OutboxMessage
from tests import factories


@pytest.fixture(autouse=True)
def allowed(settings: Any) -> None:
    """Allow operators to edit dead letters."""
    settings.TXMSG = {**settings.TXMSG, "EDIT_DEAD_LETTERS": True}


def letter_with(**values: Any) -> DeadLetter:
    """Return a dead letter with a `tenant` header."""
    letter: DeadLetter = factories.DeadLetterFactory(**values)
    letter.headers["tenant"] = "north"
    letter.save()
    return letter


def url(letter: DeadLetter) -> str:
    """Return the page's address."""
    return f"/admin/django_txmsg/deadletter/{letter.pk}/copy/"


def test_the_form_shows_what_may_be_edited_and_what_is_locked(
    operator: Client,
) -> None:
    letter = letter_with()

    response = operator.get(url(letter))

    assert response.context["form"]["headers"] == "tenant: north"
    assert '"order": 1' in response.context["form"]["body"]
    assert ("txmsg-id", str(letter.message_id)) in response.context["locked"]


def test_the_difference_is_shown_before_anything_is_sent(operator: Client) -> None:
    letter = letter_with()

    response = operator.post(
        url(letter), {"headers": "tenant: south", "body": '{\r\n  "order": 2\r\n}'}
    )

    lines = [line for kind, line in response.context["form"]["diff"] if kind != "same"]
    assert "-tenant: north" in lines
    assert "+tenant: south" in lines
    assert '-  "order": 1' in lines
    assert '+  "order": 2' in lines
    assert OutboxMessage.objects.count() == 0


def test_the_copy_has_an_id_of_its_own_and_the_original_is_replaced(
    operator: Client,
) -> None:
    letter = letter_with()

    operator.post(
        url(letter), {"headers": "tenant: south", "body": '{"order": 2}', "send": "1"}
    )

    letter.refresh_from_db()
    copy = OutboxMessage.objects.get()
    assert letter.resolution == "replaced"
    assert letter.replaced_by == copy.message_id != letter.message_id
    headers = {"tenant": "south", wire.COPY_OF: str(letter.message_id)}
    assert (bytes(copy.body), copy.headers) == (b'{"order": 2}', headers)
    assert str(copy.message_id) in LogEntry.objects.get().change_message


def test_an_untouched_body_is_sent_byte_for_byte(operator: Client) -> None:
    letter = letter_with(body=b'{"order":   1}')
    shown = operator.get(url(letter)).context["form"]["body"]

    operator.post(url(letter), {"headers": "", "body": shown, "send": "1"})

    assert bytes(OutboxMessage.objects.get().body) == b'{"order":   1}'


@pytest.mark.parametrize(
    ("headers", "body", "word"),
    [
        ("tenant: north", "{broken", "not valid JSON"),
        ("no colon", "{}", "Not a header"),
        ("txmsg-id: mine", "{}", "txmsg-id"),
    ],
)
def test_invalid_copy_is_reported_and_not_sent(
    operator: Client, headers: str, body: str, word: str
) -> None:
    letter = letter_with()

    response = operator.post(
        url(letter), {"headers": headers, "body": body, "send": "1"}
    )

    assert word in response.context["form"]["error"]
    assert OutboxMessage.objects.count() == 0
    letter.refresh_from_db()
    assert letter.resolution == "open"


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"discarded": True}, "not open any more"),
        ({"body": b"\xff\xfe"}, "not text"),
        ({"body": b'"' + b"x" * 300_000 + b'"'}, "too long"),
    ],
)
def test_uneditable_letter_says_why(
    operator: Client, values: dict[str, Any], word: str
) -> None:
    response = operator.get(url(letter_with(**values)), follow=True)

    assert word in response.content.decode()


def test_a_dead_letter_that_is_gone_leads_back(operator: Client) -> None:
    letter = letter_with()
    letter.delete()
    letter.pk = 4711

    assert (
        "no dead letter 4711" in operator.get(url(letter), follow=True).content.decode()
    )


def test_editing_copies_is_off_by_default(operator: Client, settings: Any) -> None:
    letter = letter_with()
    settings.TXMSG = {**settings.TXMSG, "EDIT_DEAD_LETTERS": False}

    assert operator.get(url(letter)).status_code == 403
    assert operator.post(url(letter), {"send": "1"}).status_code == 403


@pytest.mark.parametrize("missing", ["edit_deadletter", "view_message_body"])
def test_editing_a_copy_needs_two_permissions(
    somebody: Callable[..., Client], missing: str
) -> None:
    letter = letter_with()
    wanted = {"edit_deadletter", "view_message_body", "redeliver_deadletter"}

    client = somebody("view_deadletter", *(wanted - {missing}))

    assert client.get(url(letter)).status_code == 403


@pytest.mark.parametrize(
    "body", ["\n\nUNB+UNOC:3\nUNH+1", "MSH|^~\r\nPID|1\r\n", "MSH|^~\rPID|1\r", "a"]
)
def test_a_text_keeps_its_first_lines_and_how_its_lines_end(
    operator: Client, body: str
) -> None:
    letter = letter_with(body=body.encode(), content_type="text/plain")
    page = operator.get(url(letter))
    shown = page.context["form"]["body"].replace("\r\n", "\n").replace("\r", "\n")
    # A browser drops one line end right after the tag, and sends CR LF.
    assert f">\n{shown}".replace("'", "&#x27;") in page.content.decode().replace(
        "\r\n", "\n"
    ).replace("\r", "\n")
    sent = shown.replace("\n", "\r\n")

    form = {"headers": "tenant: north", "send": "1"}
    operator.post(url(letter), {**form, "body": f"{sent}X"})

    assert bytes(OutboxMessage.objects.get().body) == f"{body}X".encode()


def test_body_nested_too_deeply_to_be_indented_is_edited_raw(
    operator: Client,
) -> None:
    body = '{"":' * 600 + "0" + "}" * 600
    letter = letter_with(body=body.encode())

    assert operator.get(url(letter)).context["form"]["body"] == body


def test_a_body_whose_lines_end_in_several_ways_is_not_edited(
    operator: Client,
) -> None:
    letter = letter_with(body=b"a\r\nb\nc", content_type="text/plain")
    page = operator.get(url(letter), follow=True).content.decode()
    assert "end in several ways" in page


def test_header_with_a_line_end_is_unchanged_in_a_copy(operator: Client) -> None:
    letter = letter_with()
    odd = {"tenant": " north ", "note": "one\ntwo: three", "line": "a\u2028b: c"}
    letter.headers |= odd
    letter.save()
    page = operator.get(url(letter))
    assert ("note", odd["note"]) in page.context["locked"]
    form = page.context["form"]
    given = {"headers": form["headers"].replace("\n", "\r\n"), "body": '{"order": 2}'}

    asked = operator.post(url(letter), given)
    lines = [line for _, line in asked.context["form"]["diff"]]
    assert "headers" not in lines
    operator.post(url(letter), {**given, "send": "1"})

    first = {wire.COPY_OF: str(letter.message_id)}
    assert OutboxMessage.objects.get().headers == odd | first
