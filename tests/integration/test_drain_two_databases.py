"""`drain()` in a test that may use only one of two databases."""

from __future__ import annotations

import pytest
from django.db.models import Model
from django.test import TestCase, override_settings

from django_txmsg import Message, send_message
from django_txmsg.models import OutboxMessage
from django_txmsg.testing import drain, outbox_messages
from tests.integration.test_drain import Declares


class FromAReplica:
    """A database router that reads the outbox from a replica."""

    def db_for_read(self, model: type[Model], **hints: object) -> str | None:
        return "other" if model is OutboxMessage else None

    def db_for_write(self, model: type[Model], **hints: object) -> str:
        return "default"


class TestWithOneOfTwoDatabases(TestCase, Declares):
    """The test may use only `default`, and a stage uses another database."""

    def test_drain_omits_the_stage(self) -> None:
        ran: list[Message] = []
        self.stage(ran.append, "drained.elsewhere", using="other")
        self.stage(ran.append, "drained.here")
        send_message("drained.elsewhere", None)
        send_message("drained.here", None)

        drain()

        assert [one.destination for one in ran] == ["drained.here"]

    def test_a_stage_that_the_test_names_is_not_omitted(self) -> None:
        name = self.stage(print, "drained.elsewhere", using="other")
        with pytest.raises(AssertionError, match="other"):
            drain(name)

    @override_settings(DATABASE_ROUTERS=[f"{__name__}.FromAReplica"])
    def test_messages_of_the_outbox_are_not_read_from_a_replica(self) -> None:
        send_message("drained.here", None)
        assert [one.destination for one in outbox_messages()] == ["drained.here"]
