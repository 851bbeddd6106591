"""What the consumer relies on: nothing is lost, and acknowledged messages do not
return."""

from __future__ import annotations

import time
import uuid

import pytest

from ...brokers.base import Outgoing
from .talk import Talk, bodies, numbered, numbers, take


class Receiving(Talk):
    """Messages that arrive, and their contents."""

    def test_what_is_acknowledged_never_comes_again(self, destination: str) -> None:
        self.send(*numbered(destination, 10))
        with self.consumer(destination) as session:
            deliveries = take(session, 10)
            session.ack(deliveries[:4])
            session.ack(deliveries[4:])
            assert session.receive(0.2) is None

        assert bodies(deliveries) == numbers(10)
        assert [one.redelivered for one in deliveries] == [False] * 10
        assert {one.destination for one in deliveries} == {destination}
        assert len({one.broker_message_id for one in deliveries} - {""}) == 10
        assert self.rest(destination) == []

    def test_nothing_comes_from_an_empty_destination(self, destination: str) -> None:
        with self.consumer(destination) as session:
            began = time.monotonic()
            assert session.receive(0.2) is None
            assert time.monotonic() - began >= 0.19
            assert session.receive(0) is None

    def test_what_is_not_acknowledged_comes_again_when_its_session_ends(
        self, destination: str
    ) -> None:
        self.send(*numbered(destination, 4))
        with self.consumer(destination) as session:
            deliveries = take(session, 4)
            session.ack([deliveries[1]])

        with self.consumer(destination) as session:
            again = take(session, 3)
            session.ack(again)
        assert sorted(bodies(again)) == [b"0", b"2", b"3"]
        assert [one.redelivered for one in again] == [True] * 3
        before = {one.body: one for one in deliveries}
        for one in again:
            first = before[one.body]
            assert one.id_stays == first.id_stays
            if one.id_stays:
                assert one.broker_message_id == first.broker_message_id
        assert self.rest(destination) == []

    def test_deliveries_of_a_killed_consumer_are_redelivered(
        self, destination: str
    ) -> None:
        self.send(*numbered(destination, 3))
        with self.held_elsewhere(destination):
            pass  # and there it ends

        with self.consumer(destination) as session:
            again = take(session, 3)
            session.ack(again)
        assert sorted(bodies(again)) == numbers(3)
        redelivered = {one.body: one.redelivered for one in again}
        assert redelivered[b"0"]
        assert redelivered[b"1"]

    def test_prefetch_bounds_what_a_consumer_keeps_from_others(
        self, destination: str
    ) -> None:
        self.send(*numbered(destination, 20))
        slow = self.consumer(destination, prefetch=3)
        [first] = take(slow, 1)
        with self.consumer(destination, prefetch=20) as quick:
            others = take(quick, 17)
            quick.ack(others)
            slow.close()
            rest = take(quick, 3)
            quick.ack(rest)

        found = sorted(int(one.body) for one in [*others, *rest])
        assert found == list(range(20))
        assert first.body in bodies(rest)

    def test_a_message_sent_back_comes_again_as_it_was_changed(
        self, destination: str
    ) -> None:
        self.send(Outgoing(destination, {"colour": "red"}, b"x"))
        with self.consumer(destination) as session:
            [delivery] = take(session, 1)
            changed = {"colour": "blue", "txmsg-id": str(uuid.uuid4())}
            session.send_back(delivery, changed)
            [again] = take(session, 1)
            assert again.headers.items() >= changed.items()
            assert again.body == b"x"
            session.ack([again])
        assert self.rest(destination) == []

    def test_a_prefetch_of_one_goes_on_after_each_acknowledgement(
        self, destination: str
    ) -> None:
        self.send(*numbered(destination, 5))
        with self.consumer(destination, prefetch=1) as session:
            for number in numbers(5):
                [delivery] = take(session, 1)
                assert delivery.body == number
                session.ack([delivery])

    @pytest.mark.parametrize(
        "body",
        [
            pytest.param(b"", id="empty"),
            pytest.param(b"\0", id="NUL"),
            pytest.param(bytes(range(256)) * 4, id="every-byte"),
            pytest.param(b"\n\nRECEIPT\nreceipt-id:1\n\n\0", id="looks-like-a-frame"),
            pytest.param(b"\xff\xfe\r\n" * 500_000, id="two-megabytes"),
        ],
    )
    def test_any_bytes_are_a_body(self, destination: str, body: bytes) -> None:
        self.send(Outgoing(destination, {"content-type": "application/x"}, body))
        with self.consumer(destination) as session:
            [delivery] = take(session, 1)
            session.ack([delivery])

        assert delivery.body == body
        assert delivery.problem == ""

    def test_any_text_is_a_header(self, destination: str) -> None:
        headers = {
            "colon": "a:b::c:",
            "lines": "one\ntwo\r\nthree\r",
            "backslash": "\\n \\\\ \\",
            "spaces": "  kept on both sides  ",
            "empty": "",
            "quotes": '"it\'s"',
            "not-ascii": "Grüße, 東京, 🚚",
            "näme: with\\every\nthing": "too",
            "long": "x" * 8000,
            "txmsg-id": str(uuid.uuid4()),
        }
        # In a batch and alone: some brokers handle the two differently.
        self.send(*(Outgoing(destination, headers, b"x") for _ in range(10)))
        self.send(Outgoing(destination, headers, b"x"))
        with self.consumer(destination, prefetch=20) as session:
            deliveries = take(session, 11)
            session.ack(deliveries)

        for delivery in deliveries:
            received = {name: delivery.headers.get(name) for name in headers}
            assert received == headers
            assert delivery.problem == ""

    def test_a_living_broker_answers_a_ping(self) -> None:
        with self.open() as session:
            session.ping()

    def test_a_session_can_be_closed_twice(self, destination: str) -> None:
        session = self.consumer(destination)
        session.close()
        session.close()

    def test_a_sound_url_has_nothing_wrong(self) -> None:
        assert self.broker().check() == []
        assert "secret" not in repr(self.broker())
