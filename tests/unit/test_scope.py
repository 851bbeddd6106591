"""The ids that a stage's scope derives for its messages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from django_txmsg.envelope.message import Message, new_id
from django_txmsg.sending.scope import Scope

CAUSE = Message(id=new_id(), destination="tests.q", body=None)


def attempt() -> Scope:
    return Scope(session_id=CAUSE.id, using="default", cause=CAUSE, stage="tests")


def test_a_message_of_another_thread_keeps_its_id_if_an_attempt_skips_others() -> None:
    """A stage sends messages in another thread. That thread has its own connection, so
    the messages commit separately from the stage's work. If a later attempt skips one
    of the messages, the next message still gets the same id as before."""
    first, second = attempt(), attempt()
    with ThreadPoolExecutor(1) as pool:
        skipped = pool.submit(first.derived_id, "default", lambda: ("a",)).result()
        sent = pool.submit(first.derived_id, "default", lambda: ("b",)).result()
        again = pool.submit(second.derived_id, "default", lambda: ("b",)).result()

    assert sent == again
    assert len({skipped, sent, second.derived_id("default", lambda: ("b",))}) == 3
