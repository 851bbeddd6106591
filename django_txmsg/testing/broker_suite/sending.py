"""Tests of the promises on which the relay relies: the outcome of each send is
correct."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from ... import wire
from ...brokers.base import Outgoing
from ...errors import (
    DestinationUnavailable,
    DispatchHeld,
    DispatchRejected,
    DispatchUnknown,
)
from .talk import Talk, numbered, numbers, settle, take


class Sending(Talk):
    """Tests of sending."""

    @pytest.mark.parametrize("count", [0, 1, 3, 600])
    def test_a_batch_is_stored_in_order_and_every_outcome_is_a_receipt(
        self, destination: str, count: int
    ) -> None:
        with self.open() as session:
            assert session.send(numbered(destination, count)) == [None] * count

        assert self.rest(destination) == numbers(count)

    def test_what_is_proven_is_there_while_its_sender_goes_on(
        self, destination: str
    ) -> None:
        """After the sender has got a receipt, a consumer must be able to receive the
        message, even if the sender's session stays open."""
        with self.open() as session:
            assert session.send(numbered(destination, 3)) == [None] * 3
            assert self.rest(destination) == numbers(3)
            assert session.send(numbered(destination, 2)) == [None] * 2
            assert self.rest(destination) == numbers(2)

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

    def test_followers_of_a_refused_message_are_held_back(
        self, destination: str
    ) -> None:
        batch = [
            Outgoing(destination, {wire.KEY: "ab"[n % 2]}, b"%d" % n) for n in range(6)
        ]
        batch[2] = Outgoing(destination, {wire.KEY: "a", "name": "NUL \0"}, b"2")
        with self.open() as session:
            outcomes = session.send(batch)
        _, _, odd, _, follower, _ = outcomes
        if odd is None:
            assert outcomes == [None] * 6
            assert self.rest(destination) == numbers(6)
            return
        assert isinstance(odd, DispatchRejected)
        assert isinstance(follower, DispatchHeld)
        assert [outcomes[n] for n in (0, 1, 3, 5)] == [None] * 4
        assert self.rest(destination) == [b"0", b"1", b"3", b"5"]

    def turned_away(self, destination: str) -> AbstractContextManager[object] | None:
        """Override this if your broker can refuse all messages to one destination.

        Return a context manager. While its block runs, this destination must refuse
        messages, because it is full or forbidden. Other destinations must still accept
        messages.
        """
        return None

    def test_a_destination_that_takes_nothing_says_so_and_others_go_on(
        self, destination: str
    ) -> None:
        state = self.turned_away(destination)
        if state is None:
            return
        free = f"{destination}.free"
        with state:
            with self.open() as session:
                turned_away, *later = session.send(
                    numbered(destination, 2), isolate=True
                )
            assert isinstance(turned_away, DestinationUnavailable)
            assert str(turned_away), "no word of the broker's"
            for one in later:
                unsent = isinstance(one, DispatchUnknown) and not one.written
                assert unsent or isinstance(one, DestinationUnavailable)
            with self.open() as session:
                batch = [*numbered(destination, 1), *numbered(free, 3)]
                first, *others = session.send(batch)
            if isinstance(first, DispatchUnknown):
                assert first.hung_up, "it has answered"
                with self.open() as session:
                    others = session.send(numbered(free, 3))
            else:
                assert isinstance(first, DestinationUnavailable)
            assert others == [None] * 3
            assert sorted(set(self.rest(free))) == numbers(3)
        self.send(Outgoing(destination, {}, b"again"))
        assert self.rest(destination) == [b"again"]

    def refused(self, destination: str) -> Outgoing | None:
        """Override this if your broker refuses some messages.

        Return a message, addressed to `destination`, that your broker refuses. The
        broker may also close the connection when it gets the message.
        """
        return None

    def test_isolated_messages_show_on_which_one_a_broker_hangs_up(
        self, destination: str
    ) -> None:
        refused = self.refused(destination)
        if refused is None:
            return
        batch = numbered(destination, 5)
        batch[2] = refused
        with self.open() as session:
            *stored, bad, third, last = session.send(batch, isolate=True)
        assert stored == [None, None]
        if isinstance(bad, DispatchUnknown):
            assert bad.written
            assert bad.hung_up
        else:
            assert isinstance(bad, DispatchRejected)
        for later in (third, last):
            if later is not None:
                assert isinstance(later, DispatchUnknown)
                assert not later.written
        proven = [b for b, error in ((b"3", third), (b"4", last)) if error is None]
        assert self.rest(destination) == [b"0", b"1", *proven]


# What the modes with a broker's transaction rely on.


class Transactions(Talk):
    """Tests of transactions on the broker. A transaction contains sends and
    acknowledgements."""

    def test_a_transaction_sends_and_acknowledges_together(
        self, destination: str
    ) -> None:
        target = f"{destination}.next"
        self.send(*numbered(destination, 2))
        with self.consumer(destination, transacted=True) as session:
            for number in numbers(2):
                [delivery] = take(session, 1)
                session.enlist(Outgoing(target, {"name": "a:b"}, number))
                session.enlist(Outgoing(target, {}, number))
                session.commit([delivery])

        assert self.rest(target) == [b"0", b"0", b"1", b"1"]
        assert self.rest(destination) == []

    def test_a_transaction_rolled_back_sends_nothing_and_its_message_stays_in_hand(
        self, destination: str
    ) -> None:
        target = f"{destination}.next"
        self.send(*numbered(destination, 1))
        with self.consumer(destination, transacted=True) as session:
            [delivery] = take(session, 1)
            session.enlist(Outgoing(target, {}, b"taken back"))
            session.rollback()
            assert self.rest(target) == []
            session.enlist(Outgoing(target, {}, b"stays"))
            session.commit([delivery])

        assert self.rest(target) == [b"stays"]
        assert self.rest(destination) == []

    def test_a_message_can_be_acknowledged_alone_after_a_rollback(
        self, destination: str
    ) -> None:
        """After a rollback, a transacted session must be able to acknowledge a delivery
        by `ack()`. When a handler fails, the consumer stores the message in the
        database, and then acknowledges the delivery in this way."""
        self.send(*numbered(destination, 2))
        with self.consumer(destination, transacted=True, prefetch=1) as session:
            for _ in range(2):
                [delivery] = take(session, 1)
                session.enlist(Outgoing(f"{destination}.next", {}, b"taken back"))
                session.rollback()
                session.ack([delivery])

        assert self.rest(f"{destination}.next") == []
        assert self.rest(destination) == []

    def test_a_rolled_back_delivery_is_redelivered_to_another_session(
        self, destination: str
    ) -> None:
        self.send(*numbered(destination, 1))
        with self.consumer(destination, transacted=True) as session:
            take(session, 1)
            session.enlist(Outgoing(f"{destination}.next", {}, b"taken back"))
            session.rollback()

        assert self.rest(destination) == numbers(1)
        assert self.rest(f"{destination}.next") == []

    def test_a_transaction_its_session_did_not_commit_never_happened(
        self, destination: str
    ) -> None:
        target = f"{destination}.next"
        self.send(*numbered(destination, 1))
        with self.consumer(destination, transacted=True) as session:
            take(session, 1)
            session.enlist(Outgoing(target, {}, b"never"))

        with self.consumer(destination) as session:
            [again] = settle(session, 1)
        assert again.redelivered
        assert self.rest(target) == []

    def test_a_transaction_with_nothing_in_it_commits(self, destination: str) -> None:
        with self.consumer(destination, transacted=True) as session:
            session.commit([])
            session.rollback()
