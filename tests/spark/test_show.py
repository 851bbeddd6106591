"""`show` finds a message in the databases and in the lake."""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import replace

import pytest

from django_txmsg.rules.dead_letters import GONE_ON
from django_txmsg.spark import cli
from django_txmsg.spark.errors import EnvironmentFault, SpoiltFile
from django_txmsg.spark.schemas import INBOX
from django_txmsg.spark.spec import JobSpec, LakeSpec, SourceSpec
from tests.spark.archives import archive
from tests.spark.log import LONG_AGO, Log
from tests.spark.running import outcome, run
from tests.spark.test_bitrot import chunk, files_of, flipped

MINUTE = dt.timedelta(minutes=1)


def test_a_message_is_shown_from_databases_and_lake(make_log, lake: LakeSpec) -> None:
    shop: Log = make_log("sqlite")
    payments: Log = make_log("sqlite", "payments")
    message, other = uuid.uuid4(), uuid.uuid4()
    shop.send(
        [{"message_id": message, "key": "customer's", "due_at": LONG_AGO + MINUTE,
          "dispatched_at": LONG_AGO + MINUTE}, {"message_id": other}]
    )  # fmt: skip
    died = LONG_AGO + 2 * MINUTE
    payments.receive(
        [{"message_id": message, "first_received_at": LONG_AGO + MINUTE,
          "dead_at": died, "last_error": "ValueError: no\nand more"}]
    )  # fmt: skip
    payments.bury([{"message_id": message, "created_at": died}])
    archive(None, shop, lake)
    spec = JobSpec((shop.spec, payments.spec), lake)

    by_id = run(spec, "show", str(message))["steps"]

    assert [(one["service"], one["place"], one["what"]) for one in by_id] == [
        ("shop", "lake", "stored for orders.place"),
        ("shop", "lake", "due"),
        ("shop", "lake", "dispatched to broker default"),
        ("payments", "database", "received by orders.place, from shop"),
        ("payments", "database", "given up by orders.place: ValueError: no"),
        ("payments", "database", "dead letter: redeliveries_exhausted"),
    ]  # fmt: skip
    assert {one["message_id"] for one in by_id} == {str(message)}
    assert "00 UTC  " in outcome(spec, "show", str(message)).lines[0]
    # Also the rows in which a message has no key.
    assert run(spec, "show", "customer's")["steps"] == by_id
    assert "know 'nothing'" in outcome(spec, "show", "nothing").lines[0]
    # Who looks leaves no trace.
    assert shop.value("SELECT count(*) FROM django_txmsg_pipelinerun") == 0


def test_a_topics_message_is_shown_at_stages_of_two_databases(
    make_log, lake: LakeSpec
) -> None:
    """Its rows have the same id in both databases of the service."""
    logs: list[Log] = [make_log("sqlite"), make_log("sqlite", "other")]
    logs[1].spec = replace(logs[1].spec, service="shop")
    message = uuid.uuid4()
    for log, stage in zip(logs, ("one", "two"), strict=True):
        log.receive([{"message_id": message, "stage": stage}])
    archive(None, logs[0], lake, table=INBOX)
    spec = JobSpec(tuple(log.spec for log in logs), lake)

    shown = run(spec, "show", str(message))["steps"]

    received = {one["what"]: one["place"] for one in shown if "received" in one["what"]}
    assert received == {
        "received by one, from shop": "lake",
        "received by two, from shop": "database",
    }


def test_no_more_of_the_lake_is_read_than_can_have_the_message(
    make_log, lake: LakeSpec
) -> None:
    """A file with another message has a flipped bit. If `show` reads it, it fails."""
    log: Log = make_log("sqlite")
    low, wanted, high, last = (uuid.UUID(int=number) for number in range(4))
    log.send(
        [{"message_id": one, "key": "k", "created_at": LONG_AGO} for one in (low, high)]
        + [{"message_id": one, "key": key, "created_at": LONG_AGO + 1440 * MINUTE}
           for one, key in ((wanted, "y"), (last, "z"))]
    )  # fmt: skip
    archive(None, log, lake)
    spec = JobSpec((log.spec,), lake)
    other, _ = files_of(lake)

    with flipped(other, chunk(other, "destination")[1] - 1):
        assert run(spec, "show", str(wanted))["steps"]
        with pytest.raises(SpoiltFile, match=other.name):
            run(spec, "show", str(low))
    with flipped(other, chunk(other, "message_id")[1] - 1):
        # The statistics do not exclude `wanted`.
        with pytest.raises(SpoiltFile, match=other.name):
            run(spec, "show", str(wanted))
        assert run(spec, "show", str(last))["steps"]
        assert run(spec, "show", "z")["steps"]


@pytest.mark.parametrize(
    ("by", "words"),
    [
        ("linus", " by linus"),
        (GONE_ON, " because its flow has gone on"),
        ("", ""),
    ],
)
def test_a_resolved_letter_is_shown_with_its_resolver(
    make_log, by: str, words: str
) -> None:
    log: Log = make_log("sqlite")
    message = uuid.uuid4()
    log.bury(
        [{"message_id": message, "resolution": "discarded", "resolved_by": by,
          "resolved_at": LONG_AGO + MINUTE}]
    )  # fmt: skip

    [_, resolved] = run(JobSpec((log.spec,)), "show", str(message))["steps"]

    assert resolved["what"] == f"dead letter discarded{words}"


def test_control_characters_of_a_message_do_not_reach_the_terminal(
    make_log, capsys
) -> None:
    log: Log = make_log("sqlite")
    message = uuid.uuid4()
    log.receive(
        [{"message_id": message, "service": "shop\rforged\x1b[2J",
          "dead_at": LONG_AGO + MINUTE, "last_error": "no\r\x1b[2J"}]
    )  # fmt: skip
    words = ["show", str(message), "--spec", JobSpec((log.spec,)).to_json()]

    assert cli.main(words) == 0

    shown = capsys.readouterr().out
    assert r"from shop\rforged\x1b[2J (database)" in shown
    assert r"given up by orders.place: no\r\x1b[2J (database)" in shown
    assert all(line.isprintable() for line in shown.splitlines())


@pytest.mark.parametrize(
    "url", ["sqlite:////nowhere/db", "postgresql://u@127.0.0.1:1/x"]
)
def test_an_unreachable_database_is_told_in_a_sentence(url: str) -> None:
    spec = JobSpec((SourceSpec("shop", url),))
    with pytest.raises(
        EnvironmentFault, match=r"no SQLite database|[Cc]onnection refused"
    ):
        run(spec, "show", "k")


def test_the_variable_of_a_missing_password_is_named(pg_log: Log) -> None:
    source = replace(pg_log.spec, url=pg_log.spec.shown, password_env="")
    spec = JobSpec((source,))
    with pytest.raises(EnvironmentFault, match="variable TXMSG_PASSWORD_NAME"):
        run(spec, "show", "k")
