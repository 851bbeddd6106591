"""A lake in an object store: rows are written and read back, and the access key is
written nowhere."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from django_txmsg.spark.errors import EnvironmentFault
from django_txmsg.spark.lake import Lake
from django_txmsg.spark.schemas import INBOX, OUTBOX
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests.services import S3
from tests.services.s3 import SECRET
from tests.spark.archives import archive
from tests.spark.log import Log
from tests.spark.running import outcome, run


@pytest.fixture
def bucket(s3: S3) -> LakeSpec:
    """The address of a lake in a new bucket."""
    name = f"lake-{uuid.uuid4().hex[:12]}"
    s3.make_bucket(name)
    return LakeSpec(f"s3://{name}/of/ours", storage_options=s3.options)


def rows_in(lake: LakeSpec, name: str) -> pa.Table:
    """Return all rows of a table, read with the Delta library."""
    options = dict(lake.storage_options)
    table = DeltaTable(f"{lake.uri}/{name}", storage_options=options)
    return pa.table(table.to_pyarrow_table())


@pytest.mark.matrix
def test_messages_go_to_the_store_and_come_back(
    spark: Any, make_log: Callable[..., Log], bucket: LakeSpec
) -> None:
    log = make_log("sqlite")
    spec = JobSpec((log.spec,), bucket)
    ids = [uuid.uuid4() for _ in range(250)]
    log.send([{"message_id": one, "body": b"%d" % n} for n, one in enumerate(ids)])
    log.receive([{"message_id": one} for one in ids[5:]])
    for table in (OUTBOX, INBOX):
        archive(spark, log, bucket, table=table)
    assert log.count() == log.count("django_txmsg_inboxmessage") == 0

    judged = run(spec, "reconcile", "--grace", "0s")
    chosen = f"message_id in ('{ids[0]}', '{ids[7]}')"
    stored = run(spec, "replay", "--where", chosen, "--name", "again")

    assert judged["destinations"] == {"orders.place": {"never_received": 5, "ok": 245}}
    # What it found before is no news, which it reads in the store, too.
    assert run(spec, "reconcile", "--grace", "0s")["new"] == {}
    assert stored["rows"] == 2
    bodies = log.rows("SELECT body FROM django_txmsg_outboxmessage ORDER BY body")
    assert [bytes(one[0]) for one in bodies] == [b"0", b"7"]

    # What is joined, erased and proven is the same there.
    assert run(spec, "sweep")["counts"]["outbox"]["compacted"] == 3
    erased = run(spec, "erase", "--message-id", str(ids[3]))
    assert erased["lake"]["outbox"] == 1
    verified = outcome(spec, "verify")
    assert (verified.exit_code, rows_in(bucket, "outbox").num_rows) == (0, 249)
    # A file that is gone is told.
    place = Lake(bucket).table("inbox", INBOX.lake_struct())
    place.files.delete_file(f"{place.root}/{place.named()[0].path}")
    assert outcome(spec, "verify").exit_code == 4


def test_the_stores_keys_are_written_nowhere_and_bodies_only_where_they_may(
    make_log: Callable[..., Log],
    bucket: LakeSpec,
    capfd: pytest.CaptureFixture[str],
) -> None:
    log = make_log("sqlite")
    bucket = dataclasses.replace(bucket, keep_bodies=False)
    spec = JobSpec((log.spec,), bucket)
    log.send([{"message_id": uuid.uuid4(), "body": b"personal"}])
    run(spec, "archive", "--table", "outbox", "--older-than", "1d")
    [row] = rows_in(bucket, "outbox").to_pylist()
    assert (row["destination"], row["body"]) == ("orders.place", None)

    nowhere = dataclasses.replace(bucket, uri="s3://no-such-bucket-of-ours/lake")
    with pytest.raises(EnvironmentFault) as refused:
        run(JobSpec((log.spec,), nowhere), "verify")

    records = log.rows("SELECT * FROM django_txmsg_pipelinerun")
    told = [
        repr(spec), spec.to_json(), repr(records), str(refused.value),
        json.dumps(rows_in(bucket, "runs").to_pylist(), default=str),
        *capfd.readouterr(),
    ]  # fmt: skip
    assert len(records) == 2
    assert [one for one in told if SECRET in one] == []
