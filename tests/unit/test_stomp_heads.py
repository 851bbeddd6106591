"""The messages of a batch share encoded headers. Each frame equals the frame of the
same message sent alone."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_txmsg import jms
from django_txmsg.brokers.base import Outgoing
from django_txmsg.brokers.stomp import StompBroker, StompSession
from django_txmsg.brokers.stomp_heads import Heads
from django_txmsg.jms import destination as destinations
from django_txmsg.jms.message import DEFAULT, Encoded
from django_txmsg.testing import ScriptedBroker

ID = "5a1bd5e0-47f4-4a34-93a5-3f5cb3f9e6a1"
CREATED = "2026-11-23T09:34:25.674413+00:00"
USUAL = {
    "content-type": "application/json",
    "txmsg-id": ID,
    "txmsg-service": "shop",
    "txmsg-created": CREATED,
}
HOSTILE = [
    "%", "%s", "%(txmsg-id)s", "100%%", "{}", "a:b", "a\nb", "a\r\nb", "a\\c", "\\",
    "\x00", "a\n\x00b", "é", "𝄞", "\ud800", "0.", f"{ID}1.", "x" * 300, "é" * 100,
    5, b"bytes", [1], True,
]  # fmt: skip
NAMES = [
    *USUAL, "txmsg-key", "txmsg-after", "txmsg-expires", "correlation-id",
    "traceparent", "own", "o%wn", "o:wn", "priority", "expires", "receipt",
    "content-length", "destination", "txmsg_id", "amq-msg-type", "", "reply-to",
]  # fmt: skip
BODIES = [b"{}", b"", b"\x00", b"\xff", "𝄞".encode(), b"%s", b"x" * 300]
DESTINATIONS = ["orders.place", "topic:a%s", "a?b", "", "a\nb", "a/b"]


@pytest.fixture(scope="module", params=["activemq", "rabbitmq"])
def session(request: pytest.FixtureRequest) -> Iterator[StompSession]:
    with ScriptedBroker() as broker:
        session = StompBroker("d", f"{broker.url}?dialect={request.param}").open()
        yield session
        session.close()


def frame(session: StompSession, item: Any) -> Any:
    """Return the frame of an outgoing message, or the error that the encoding
    raises."""
    try:
        if not isinstance(item, Encoded):
            item = session._session.encode(
                destinations.parse(item[0]), item[1], DEFAULT
            )
    except jms.MessagingError as error:
        return type(error), str(error)
    return item.frame(transaction="tx-1"), item.provided.message_id


def same(session: StompSession, *batch: Outgoing) -> int:
    """Check that each frame is the same with and without shared headers. Return how
    many frames used shared headers."""
    heads, filled = Heads(session._session, session._message), 0
    for one in batch:
        try:
            plain = one.destination, session._message(one)
        except (AttributeError, TypeError) as error:
            with pytest.raises(type(error)):
                heads.item(one)
            continue
        item = heads.item(one)
        assert frame(session, item) == frame(session, plain)
        filled += isinstance(item, Encoded)
    return filled


def test_messages_that_share_their_headers_are_filled_in(session: StompSession) -> None:
    batch = [
        Outgoing(
            "orders.place",
            {
                **USUAL,
                "own": "100%",
                "txmsg-id": str(uuid.uuid4()),
                "correlation-id": n,
            },
            b"{}",
        )
        for n in ("", "a", "a:b", "%s", "é")
    ]

    assert same(session, *batch) == len(batch) - 1


@pytest.mark.parametrize("name", NAMES)
def test_a_cached_head_gives_the_same_frame_for_any_header(
    session: StompSession, name: str
) -> None:
    for value in HOSTILE:
        heads = [USUAL, *[{**USUAL, name: value}] * 3, USUAL]
        same(session, *[Outgoing("orders.place", one, b"{}") for one in heads])


@pytest.mark.parametrize("destination", DESTINATIONS)
def test_a_cached_head_gives_the_same_frame_for_any_body_and_destination(
    session: StompSession, destination: str
) -> None:
    kinds = ("application/json", "text/plain", "application/octet-stream", "é")
    for body, kind in itertools.product(BODIES, kinds):
        usual = Outgoing("orders.place", USUAL, b"{}")
        odd = Outgoing(destination, {**USUAL, "content-type": kind}, body)
        same(session, usual, odd, odd, odd, usual)


@pytest.mark.parametrize("nothing", ["", None])
def test_without_an_id_each_gets_one_of_its_own(
    session: StompSession, nothing: Any
) -> None:
    one = Outgoing("orders.place", {**USUAL, "txmsg-id": nothing}, b"{}")
    heads = Heads(session._session, session._message)

    assert not any(isinstance(heads.item(one), Encoded) for _ in range(3))


def test_an_expiring_message_has_its_own_head(session: StompSession) -> None:
    one = Outgoing("orders.place", USUAL, b"{}", time_to_live=60.0)
    heads = Heads(session._session, session._message)

    assert not any(isinstance(heads.item(one), Encoded) for _ in range(3))


headers = st.dictionaries(
    st.sampled_from(NAMES) | st.text(), st.sampled_from(HOSTILE) | st.text(min_size=1)
)


@given(st.lists(headers, max_size=4), st.sampled_from(BODIES))
def test_no_batch_has_another_frame_than_its_messages_have(
    session: StompSession, batch: list[dict[str, Any]], body: bytes
) -> None:
    found = [Outgoing("orders.place", {**USUAL, **one}, body) for one in batch]

    same(session, *found, *found, *found)


def test_a_refused_header_is_its_messages_own_fault(session: StompSession) -> None:
    good, bad = dict(USUAL), {**USUAL, "receipt": "mine"}
    heads = Heads(session._session, session._message)
    items = [heads.item(Outgoing("q", one, b"")) for one in (good, bad, bad, bad, good)]

    kinds = [isinstance(item, Encoded) for item in items]
    assert kinds == [False, False, False, False, True]
    assert isinstance(items[1], tuple)
    with pytest.raises(jms.MessageFormatError):
        session._session.encode(destinations.parse("q"), items[1][1], DEFAULT)
