"""How `reconcile` worked once, to measure against: each side made unique, each grouped,
and both joined; nothing kept from one run to the next."""

from __future__ import annotations

import datetime as dt

import pyspark.sql.functions as sf
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import types as t
from pyspark.storagelevel import StorageLevel

from django_txmsg.spark.jobs.findings import known_findings
from django_txmsg.spark.jobs.reading import WholeLog
from django_txmsg.spark.schemas import TABLES
from django_txmsg.spark.spec import JobSpec
from django_txmsg.spark.transforms.journeys import RECEIVED, SENT, arrivals, is_topic
from django_txmsg.spark.transforms.normalise import whole_log
from django_txmsg.spark.transforms.reconcile import (
    FINDINGS,
    VERDICT,
    aged,
    observed,
    outcome,
    summary,
)

_PAIR = ("message_id", "destination", "pair")


def counts(spark: SparkSession, spec: JobSpec) -> dict[str, int]:
    """Judge all messages without grace, and return how many have which verdict."""
    now = dt.datetime.now(dt.timezone.utc)
    with WholeLog(spark, spec) as log:
        sent = _read(log, "outbox", SENT)
        received = _read(log, "inbox", RECEIVED)
        expected = observed(arrivals(received))
        limit = sf.lit(log.horizon(dt.timedelta(0)))
        verdicts = _judged(sent, received, expected, limit)
        verdicts = verdicts.persist(StorageLevel.DISK_ONLY)
        told = summary(outcome(verdicts))
        found = told.groupBy("verdict").agg(sf.sum("messages")).collect()
        findings = aged(
            verdicts.where(sf.col("verdict").isin(*FINDINGS)), known_findings(log), now
        )
        findings = findings.persist(StorageLevel.DISK_ONLY)
        findings.groupBy("verdict").count().collect()
        findings.orderBy("sent_at", "message_id").limit(20).collect()
        findings.unpersist()
        verdicts.unpersist()
    return dict(map(tuple, found))


def _read(log: WholeLog, name: str, struct: t.StructType) -> DataFrame:
    """Return lake and database, and each row once, whatever the marks say."""
    assert log.lake is not None
    table = TABLES[name]
    names = dict.fromkeys(["service", "id", "message_id", *struct.fieldNames()])
    narrow = t.StructType([f for f in table.struct().fields if f.name in names])
    kept = log.lake.table(name, table.lake_struct()).read(log.spark)
    frames = [log.read_live(table, narrow), kept.select(*narrow.fieldNames())]
    return whole_log(frames, struct)


def _judged(
    sent: DataFrame, received: DataFrame, expected: DataFrame, limit: Column
) -> DataFrame:
    senders = sent.groupBy("message_id", "destination").agg(
        sf.min("service").alias("sender"),
        sf.min("created_at").alias("stored_at"),
        sf.min("dispatched_at").alias("dispatched_at"),
        sf.when(sf.count("*") == sf.count("dead_at"), sf.max("dead_at")).alias(
            "died_at"
        ),
    )
    wanted = expected.select(
        sf.col("destination").alias("topic"), sf.col("consumer").alias("owed"), "since"
    )
    listens = (sf.col("destination") == sf.col("topic")) & (
        sf.col("stored_at") >= sf.col("since")
    )
    keyed = senders.join(sf.broadcast(wanted), listens, "left")
    keyed = keyed.dropDuplicates(["message_id", "destination", "owed"])
    keyed = keyed.withColumn("pair", sf.coalesce("owed", sf.lit("")))
    receipts = received.groupBy(
        "message_id", "destination",
        sf.concat_ws("/", "service", "stage").alias("consumer"),
    ).agg(
        sf.min("created_at").alias("told_at"),
        sf.min("first_received_at").alias("received_at"),
        sf.min("processed_at").alias("processed_at"),
        sf.max("dead_at").alias("buried_at"),
        sf.sum("deliveries").alias("deliveries"),
        sf.count("processed_at").alias("times_processed"),
    )  # fmt: skip
    topic = is_topic(sf.col("destination"))
    receipts = receipts.withColumn(
        "pair", sf.when(topic, sf.col("consumer")).otherwise("")
    )
    joined = keyed.join(receipts, [*_PAIR], "full").withColumn(
        "sent_at", sf.coalesce("stored_at", "told_at")
    )
    done = sf.col("processed_at").isNotNull()
    late = sf.unix_micros("processed_at") - sf.unix_micros("sent_at") > 3_600_000_000
    verdict = (
        sf.when(sf.col("times_processed") > 1, "processed_twice")
        .when(sf.col("sender").isNull(), "unknown_sender")
        .when(done & late, "late")
        .when(done & (sf.col("deliveries") > 1), "redelivered_deduplicated")
        .when(done, "ok")
        .when(sf.col("buried_at").isNotNull() | sf.col("died_at").isNotNull(), "dead")
        .when(sf.col("received_at").isNotNull(), "in_flight")
        .when(sf.col("dispatched_at").isNull(), "in_flight")
        .when(sf.coalesce("sent_at", "received_at") >= limit, "in_flight")
        .otherwise("never_received")
    )
    return joined.withColumn("verdict", verdict).select(*VERDICT.fieldNames())
