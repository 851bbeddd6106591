"""What the relay relies on: every outcome is a proof."""

from __future__ import annotations

import pytest

from ...brokers.base import Outgoing
from ...errors import DispatchRejected
from .talk import Talk, numbered, numbers, take


class Sending(Talk):
    """Messages that are handed over."""

    @pytest.mark.parametrize("count", [0, 1, 3, 600])
    def test_a_batch_is_stored_in_order_and_every_outcome_is_a_receipt(
        self, destination: str, count: int
    ) -> None:
        with self.open() as session:
            assert session.send(numbered(destination, count)) == [None] * count

        assert self.rest(destination) == numbers(count)

    def test_an_isolated_batch_is_stored_as_well(self, destination: str) -> None:
        with self.open() as session:
            assert session.send(numbered(destination, 5), isolate=True) == [None] * 5

        assert self.rest(destination) == numbers(5)

    def test_a_batch_may_go_to_many_destinations(self, destination: str) -> None:
        names = [f"{destination}.{number}" for number in range(4)]
        self.send(*(Outgoing(names[i % 4], {}, str(i).encode()) for i in range(40)))

        for index, name in enumerate(names):
            assert self.rest(name) == numbers(40)[index::4]

    @pytest.mark.parametrize(
        "bad",
        [
            pytest.param({"name": "NUL \0"}, id="NUL"),
            pytest.param({"": "no name"}, id="no-name"),
            pytest.param({"name": "half a \ud83d pair"}, id="surrogate"),
        ],
    )
    @pytest.mark.parametrize("count", [3, 50])
    def test_headers_no_broker_can_carry_are_refused_alone_or_arrive_whole(
        self, destination: str, bad: dict[str, str], count: int
    ) -> None:
        batch = numbered(destination, count)
        batch[1] = Outgoing(destination, bad, b"odd")
        with self.open() as session:
            outcomes = session.send(batch)
            odd = outcomes.pop(1)
            assert outcomes == [None] * (count - 1)
            assert odd is None or isinstance(odd, DispatchRejected)

        with self.consumer(destination, prefetch=count) as session:
            found = {one.body: one for one in take(session, count - (odd is not None))}
            session.ack(list(found.values()))
        assert len(found) == count - (odd is not None)
        if odd is None:
            assert found[b"odd"].headers.items() >= bad.items()
