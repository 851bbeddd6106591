"""What the modes with a broker's transaction rely on."""

from __future__ import annotations

from ...brokers.base import Outgoing
from .talk import Talk, numbered, numbers, take


class Transactions(Talk):
    """Sends and acknowledgements that belong together."""

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
        """The consumer does this with a failed message that the database has taken
        over."""
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
            [again] = take(session, 1)
            session.ack([again])
        assert again.redelivered
        assert self.rest(target) == []

    def test_a_transaction_with_nothing_in_it_commits(self, destination: str) -> None:
        with self.consumer(destination, transacted=True) as session:
            session.commit([])
            session.rollback()
