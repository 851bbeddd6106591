"""A message is immutable, hides secrets in its repr, and contains only what every
broker can carry."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import uuid
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_txmsg.envelope.message import (
    Message,
    check_destination,
    check_headers,
    check_key,
)
from django_txmsg.errors import InvalidMessage

MESSAGE = Message(
    id=uuid.UUID(int=1), destination="orders", body={"card": "4711"}, headers={"a": "b"}
)


def test_message_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MESSAGE.body = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        MESSAGE.headers["a"] = "c"  # type: ignore[index]


def test_its_repr_tells_no_secrets() -> None:
    assert "4711" not in repr(MESSAGE)
    assert str(MESSAGE.id) in repr(MESSAGE)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_it_can_be_copied_and_pickled(again: Callable[[Message], Message]) -> None:
    copied = again(MESSAGE)
    assert copied == MESSAGE
    assert copied.body is not MESSAGE.body


def test_an_attempt_is_a_copy_with_the_same_id() -> None:
    second = MESSAGE.attempted(2)
    assert (second.delivery_attempt, MESSAGE.delivery_attempt) == (2, 0)
    assert second.id == MESSAGE.id


@pytest.mark.parametrize("name", ["CC", "BCC", "cc", "Bcc", "reply-to"])
def test_headers_that_a_broker_takes_for_its_own_are_refused(name: str) -> None:
    """A message may not have a header that a broker uses itself. For example, RabbitMQ
    closes the channel if the header CC is text. Without this check, the relay would get
    the error long after the call."""
    with pytest.raises(InvalidMessage, match=name):
        check_headers({name: "accounts@example.com"})


def test_headers_together_are_shorter_than_what_a_stage_reads() -> None:
    """A stage buries a message whose headers are too long in all."""
    headers = {f"h{n}": "x" * 8000 for n in range(8)}
    assert check_headers(headers) == headers
    with pytest.raises(InvalidMessage, match="72018 characters"):
        check_headers(headers | {"h8": "x" * 8000})


@given(st.dictionaries(st.text(), st.text()))
def test_headers_are_taken_as_they_are_or_refused(headers: dict[str, str]) -> None:
    try:
        taken = check_headers(headers)
    except InvalidMessage:
        return
    assert taken == headers
    for name, value in taken.items():
        assert "\x00" not in name + value
        assert name.strip() == name != ""
        assert not name.lower().startswith("txmsg-")


@given(st.text())
def test_destinations_have_names_that_every_broker_knows(name: str) -> None:
    try:
        check_destination(name)
    except InvalidMessage:
        return
    plain = name.removeprefix("topic:")
    assert plain
    assert all(one.isascii() and (one.isalnum() or one in "._-") for one in plain)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ("/queue/orders.place", "'orders.place'"),
        ("/topic/orders.placed", "'topic:orders.placed'"),
    ],
)
def test_the_error_for_a_brokers_prefix_names_the_destination_without_it(
    given: str, plain: str
) -> None:
    with pytest.raises(InvalidMessage, match=f"write {plain}"):
        check_destination(given)


@pytest.mark.parametrize("good", ["orders", "orders.place", "topic:orders-placed_1"])
def test_valid_destinations_are_accepted(good: str) -> None:
    assert check_destination(good) == good


@pytest.mark.parametrize("bad", ["", "a b", "/q/a", "a\n", "topic:", "x" * 256, None])
def test_invalid_destinations_are_refused(bad: object) -> None:
    with pytest.raises(InvalidMessage, match="destination"):
        check_destination(bad)


def test_keys_are_text_of_1_to_255_characters() -> None:
    assert check_key(None) == ""
    assert check_key("customer 7 / ü") == "customer 7 / ü"
    for bad in ("", 7, "x" * 256, "\x00"):
        with pytest.raises(InvalidMessage):
            check_key(bad)
