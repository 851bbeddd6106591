"""Whether a broker's declared capabilities are true."""

from __future__ import annotations

from .talk import Talk, numbered, numbers


class Capabilities(Talk):
    """The attributes that the package reads."""

    def test_its_capabilities_are_of_their_types(self) -> None:
        broker = self.broker()
        assert broker.consumable is True  # the suite receives
        assert isinstance(broker.kind, str)
        assert broker.stored_in is None or isinstance(broker.stored_in, str)

    def test_what_is_stored_in_a_database_belongs_to_its_transaction(
        self, destination: str
    ) -> None:
        """A session that is about to commit stores its control message with the data,
        so nothing else would dispatch its messages."""
        alias = self.broker().stored_in
        if alias is None:
            return
        from django.db import connections, transaction

        assert alias in connections
        with self.broker().open() as session:
            with transaction.atomic(using=alias):
                assert session.send(numbered(destination, 2)) == [None, None]
                transaction.set_rollback(True, using=alias)
            assert self.rest(destination) == []
            with transaction.atomic(using=alias):
                assert session.send(numbered(destination, 3)) == [None] * 3
        assert self.rest(destination) == numbers(3)
