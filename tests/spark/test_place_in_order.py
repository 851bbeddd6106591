"""Messages that the pipeline stores under new ids get a place in the order of their
key."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from django_txmsg import wire
from django_txmsg.management.commands.pipeline import source_spec
from django_txmsg.models import OutboxMessage
from django_txmsg.spark.spec import JobSpec
from tests.running import send, ship
from tests.spark.conftest import committing
from tests.spark.running import run


def sent_and_predecessors() -> tuple[list[uuid.UUID], list[uuid.UUID | None]]:
    """Return the ids of all messages in the order of their sending, and the
    predecessors that their links name."""
    rows = list(OutboxMessage.objects.order_by("pk"))
    links = [wire.after(row.headers) for row in rows]
    return [row.message_id for row in rows], [link and link[0] for link in links]


@committing
def test_sent_rows_and_copies_follow_the_messages_of_their_key(
    spark: Any, settings: Any, tmp_path: Path
) -> None:
    spec = JobSpec((source_spec("default", "tests"),))
    source = tmp_path / "steps.csv"
    source.write_text("n\n1\n2\n3\n")

    send("orders.place", {"n": 0}, key="k")
    ship()
    run(
        spec, "send", "--from", str(source), "--destination", "orders.place",
        "--template", '{"n": "{n}"}', "--key", "k", "--name", "n" * 64,
    )  # fmt: skip
    ship()
    send("orders.place", {"n": 4}, key="k")
    ship()
    run(spec, "replay", "--where", "key = 'k'", "--replayed", "--as", "copy")
    ship()

    ids, predecessors = sent_and_predecessors()
    assert len(ids) == 10
    assert predecessors == [None, *ids[:-1]]


@committing
@pytest.mark.matrix
def test_replay_under_the_same_ids_keeps_the_places(spark: Any, settings: Any) -> None:
    spec = JobSpec((source_spec("default", "tests"),))
    for number in range(3):
        send("orders.place", {"n": number}, key="k")
    ship()

    run(spec, "replay", "--where", "key = 'k'")
    ship()

    ids, predecessors = sent_and_predecessors()
    assert ids[3:] == ids[:3]
    assert predecessors == 2 * [None, *ids[:2]]
