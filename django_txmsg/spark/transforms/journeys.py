"""Journeys of messages. A journey combines everything that the logs have about one
message and one consumer.

A step is one row of an outbox or an inbox, or a dead letter. Steps are merged
into journeys. Both have the same columns, and the order of merging does not matter.
"""

from __future__ import annotations

import datetime as dt

import pyspark.sql.functions as sf
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import types as t

from ... import wire
from ...rules.dead_letters import TAKEN_IN
from ..schemas import struct_of
from . import MICROSECOND

#: The columns of `sent`: outbox rows of all services.
SENT = struct_of(
    "service string, message_id string, destination string, broker string, "
    "created_at timestamp, due_at timestamp, attempts integer, "
    "expires_at timestamp, dispatched_at timestamp, dead_at timestamp, "
    "cancelled_at timestamp"
)

#: The columns of `received`: inbox rows of all services, each row once.
RECEIVED = struct_of(
    "service string, stage string, message_id string, destination string, "
    "sender string, created_at timestamp, first_received_at timestamp, "
    "due_at timestamp, waits_for string, processed_at timestamp, dead_at timestamp, "
    "revoked_at timestamp, deliveries integer, attempts integer"
)

#: What `letters` must have: dead letters of all services.
LETTERS = struct_of(
    "service string, stage string, message_id string, destination string, "
    "message_created_at timestamp, created_at timestamp, resolution string, "
    "resolved_at timestamp, replaced_by string, reason string"
)

#: How an operator resolves a dead letter, and the column that has the instant.
RESOLUTIONS = {
    "redelivered": "redelivered_at",
    "replaced": "replaced_at",
    "discarded": "discarded_at",
}

#: How each column of steps is merged.
_FIRST = ("begun_at", "stored_at", "copied_at", "due_at", "told_at", "received_at",
          "processed_at", "sender", "consumer", "broker", "told_by")  # fmt: skip
_LAST = ("sent_again_at", "due_again_at", "dispatched_at", "died_at", "expires_at",
         "buried_at", "revoked_at", "tried_at", *RESOLUTIONS.values(),
         "other_consumer")  # fmt: skip
_COUNTS = ("stored", "died", "cancelled", "expire", "times_processed", "deliveries",
           "tries")  # fmt: skip
_TEXTS = frozenset(["sender", "consumer", "other_consumer", "broker", "told_by"])

#: The key of a journey. A message to a queue has one, whatever consumes it: its pair is
#: empty. A message to a topic has one for each row, `sent_us`, and those of its
#: receipts have the consumer as their pair.
KEY = ("message_id", "destination", "pair", "sent_us")

JOURNEY = t.StructType(
    [
        *[t.StructField(name, t.StringType()) for name in KEY[:3]],
        t.StructField("sent_us", t.LongType()),
        *[
            t.StructField(name, t.StringType() if name in _TEXTS else t.TimestampType())
            for name in (*_FIRST, *_LAST)
        ],
        *[t.StructField(name, t.LongType()) for name in _COUNTS],
    ]
)


#: The columns of `expected`: which stage receives from which topic, since when and, if
#: it no longer does, until when. Intervals of a pair do not overlap.
EXPECTED = struct_of(
    "destination string, consumer string, since timestamp, until timestamp"
)

#: A journey in the lake. Journeys of a message are found by `mark`, which is cheaper to
#: read than its id; `over` marks finished journeys. `took_us` is the time from when a
#: finished message was due until it was processed. `receivers` is null, except where a
#: finished message was sent to a topic: the consumers that have processed it, as JSON.
KEPT = struct_of(JOURNEY, "mark long, over boolean, took_us long, receivers string")

#: The longest processing delay of a finished journey, and the longest time by which it
#: may seem to have been processed before it was due.
PROMPT = dt.timedelta(hours=1)
EARLY = dt.timedelta(minutes=1)


def departures(sent: DataFrame) -> DataFrame:
    """Return JOURNEY rows: one step for each outbox row in `sent`."""
    stored = sf.col("created_at")
    topic = is_topic(sf.col("destination"))
    due = due_at()
    return _step(
        sent,
        pair=sf.lit(""),
        sent_us=sf.when(topic, sf.unix_micros(stored)).otherwise(0),
        sender=sf.col("service"),
        broker=sf.col("broker"),
        begun_at=stored,
        stored_at=stored,
        due_at=due,
        sent_again_at=stored,
        due_again_at=due,
        dispatched_at=sf.col("dispatched_at"),
        died_at=sf.col("dead_at"),
        expires_at=sf.col("expires_at"),
        stored=_one(stored),
        died=_one(sf.col("dead_at")),
        cancelled=_one(sf.col("cancelled_at")),
        expire=_one(sf.col("expires_at")),
    )


def due_at() -> Column:
    """Return the earliest time at which a stored message could be sent. The column
    `due_at` may be later, because each failed attempt postpones it, by at most six
    minutes. If that alone may explain why it is later, the message was due at once."""
    # As integers, the microseconds of more than five attempts would overflow.
    failed = sf.coalesce("attempts", sf.lit(0)).cast("long")
    due, stored = sf.unix_micros("due_at"), sf.unix_micros("created_at")
    most = failed * 360_000_000
    # The pauses begin with a second and double, give or take 15 %.
    pauses = sf.least(most, (sf.pow(sf.lit(2.0), failed) - 1) * 1_150_000)
    first = sf.when(due - most <= stored, stored).otherwise(due - pauses)
    return sf.timestamp_micros(first.cast("long"))


def arrivals(received: DataFrame) -> DataFrame:
    """Return JOURNEY rows: one step for each inbox row in `received`. A message has two
    such steps at one consumer if its first inbox row was deleted before the message
    arrived again. Rows without a destination are left out: their message was revoked
    before it arrived."""
    received = received.where("destination <> ''")
    consumer = sf.concat_ws("/", "service", "stage")
    # A message that waits for another one has no due time of its own.
    due = sf.when(sf.col("waits_for").isNull(), sf.col("due_at"))
    return _step(
        received,
        pair=sf.when(is_topic(sf.col("destination")), consumer).otherwise(""),
        consumer=consumer,
        other_consumer=consumer,
        told_by=sf.col("sender"),
        begun_at=sf.coalesce("created_at", "first_received_at"),
        told_at=sf.col("created_at"),
        received_at=sf.col("first_received_at"),
        tried_at=sf.greatest(sf.col("first_received_at"), due),
        processed_at=sf.col("processed_at"),
        buried_at=sf.col("dead_at"),
        revoked_at=sf.col("revoked_at"),
        times_processed=_one(sf.col("processed_at")),
        deliveries=sf.coalesce("deliveries", sf.lit(0)),
        tries=sf.coalesce("attempts", sf.lit(0)),
    )


def resolutions(letters: DataFrame) -> DataFrame:
    """Return JOURNEY rows: one step for each dead letter, and one for each copy that an
    operator has sent instead. A copy for a stage is parked directly in the inbox, so no
    outbox contains it. A dead letter without a stage belongs to a message that could
    not be sent, or that the broker has dead-lettered. To a topic, the broker sends many
    copies, and does not report which stage should have received that one."""
    stage, topic = sf.col("stage") != "", is_topic(sf.col("destination"))
    consumer = sf.concat_ws("/", "service", "stage")
    pair = sf.when(topic & stage, consumer).otherwise("")
    copied = sf.col("resolved_at")
    by_broker = sf.col("reason").isin(*TAKEN_IN) & ~topic
    return _step(
        letters,
        pair=pair,
        begun_at=sf.coalesce("message_created_at", "created_at"),
        # A message that its stage could not read has no inbox row.
        buried_at=sf.when(stage | by_broker, sf.col("created_at")),
        **{
            name: sf.when(sf.col("resolution") == kind, sf.col("resolved_at"))
            for kind, name in RESOLUTIONS.items()
        },
    ).unionByName(
        _step(
            letters.where("replaced_by IS NOT NULL").withColumn(
                "message_id", sf.col("replaced_by")
            ),
            pair=pair,
            begun_at=copied,
            copied_at=copied,
            due_at=copied,
            due_again_at=copied,
        )
    )


def steps(sent: DataFrame, received: DataFrame, letters: DataFrame) -> DataFrame:
    """Return JOURNEY rows: the steps of these outbox rows, inbox rows and dead
    letters."""
    both = departures(sent).unionByName(arrivals(received))
    return both.unionByName(resolutions(letters))


def merged(journeys: DataFrame, *by: str) -> DataFrame:
    """Merge all rows that have the same values in the columns `by`, and return the
    merged rows. Each row is a step or a journey. Without `by`, the columns of KEY
    decide."""
    by = by or KEY
    # There are few steps of each, in separate files: nothing can be merged before the
    # shuffle, and trying takes longer than shuffling.
    together = journeys.repartition("message_id")
    return together.groupBy(*by).agg(
        *[sf.min(name).alias(name) for name in _FIRST],
        *[sf.max(name).alias(name) for name in _LAST],
        *[sf.sum(name).alias(name) for name in _COUNTS],
    )


def mark() -> Column:
    """Return the mark of a message, a short hash of its id. Two messages may have the
    same mark."""
    return sf.xxhash64("message_id")


def parted(rows: DataFrame, marks: DataFrame) -> tuple[DataFrame, DataFrame]:
    """Return two frames: the rows of marked messages, and all other rows. Two messages
    may have the same mark by chance, so the first frame may also contain rows of other
    messages."""
    marked, names = rows.withColumn("mark", mark()), rows.columns
    return (
        marked.join(sf.broadcast(marks), "mark", "left_semi").select(*names),
        marked.join(sf.broadcast(marks), "mark", "left_anti").select(*names),
    )


def kept(journeys: DataFrame, expected: DataFrame) -> DataFrame:
    """Return KEPT rows: the journeys, each with a flag that says whether the journey is
    finished. If `journeys` contains one journey of a message, it must contain all
    journeys of the message. These journeys are finished:

    - the journey of a message to a queue, if the message was sent once, and processed
      once within PROMPT;
    - the journeys of a message to a topic, if the message was sent once, and each
      listener has processed it once within PROMPT. A listener is a consumer of EXPECTED
      that listened when the message was due. No other consumer may have processed the
      message.

    The message must have been due and dispatched within PROMPT of its storing, because
    a file counts it by that time. So must it have been received from a topic, because a
    later receipt does not show that its stage listened since then.

    The verdict of a finished journey depends neither on the limit for late messages nor
    on the time of the judgement. For a topic, it still depends on the listeners,
    because a later run may find more of them.
    """
    topic, sending = is_topic(sf.col("destination")), sf.col("pair") == ""
    micros = {name: sf.unix_micros(name) for name in ("stored_at", "due_at")}
    left_at = sf.greatest("due_at", "dispatched_at")
    soon = left_at <= sf.col("stored_at") + sf.lit(PROMPT)
    once = (sf.col("stored") == 1) & soon
    message = Window.partitionBy("message_id", "destination")
    rows = journeys.withColumns(
        {
            "_sendings": sf.count_if(sending).over(message),
            "_sent": sf.max(
                sf.when(sending & once & (sf.col("died") == 0), micros["stored_at"])
            ).over(message),
            "_due": sf.max(sf.when(sending, micros["due_at"])).over(message),
            "_got": sf.sort_array(
                sf.collect_set(sf.when(~sending, sf.col("pair"))).over(message)
            ),
        }
    )
    due = sf.when(topic, sf.when(~sending, sf.col("_due"))).otherwise(micros["due_at"])
    took = sf.unix_micros("processed_at") - due
    # Processed long before it was due: the clocks differ, which a run has to see.
    prompt = (sf.col("times_processed") == 1) & took.between(
        -EARLY // MICROSECOND, PROMPT // MICROSECOND
    )
    # Its file has it on the day on which the message was sent.
    receipt = (
        prompt
        & (sf.unix_micros("told_at") == sf.col("_sent"))
        & (sf.col("received_at") <= sf.col("told_at") + sf.lit(PROMPT))
    )
    listening = expected.groupBy(sf.col("destination").alias("_topic")).agg(
        sf.collect_list(
            sf.struct(
                "consumer",
                sf.unix_micros("since").alias("since"),
                sf.unix_micros("until").alias("until"),
            )
        ).alias("_listeners")
    )
    wanted = sf.transform(
        sf.filter(
            "_listeners",
            lambda one: (
                (one.since <= sf.col("_due"))
                & (one.until.isNull() | (sf.col("_due") < one.until))
            ),
        ),
        lambda one: one.consumer,
    )
    rows = rows.withColumn(
        "_received",
        sf.bool_and(sending | sf.coalesce(receipt, sf.lit(False))).over(message),
    ).join(sf.broadcast(listening), sf.col("destination") == sf.col("_topic"), "left")
    everywhere = (
        (sf.col("_sendings") == 1)
        & sf.col("_sent").isNotNull()
        & sf.col("_received")
        & (sf.coalesce(sf.sort_array(wanted), sf.array()) == sf.col("_got"))
    )
    over = sf.when(topic, everywhere).otherwise(once & prompt)
    over = sf.coalesce(over, sf.lit(False))
    return rows.withColumns(
        {
            "mark": mark(),
            "over": over,
            "took_us": sf.when(over, took),
            "receivers": sf.when(over & topic & sending, sf.to_json("_got")),
        }
    ).select(*KEPT.fieldNames())


def _step(frame: DataFrame, **known: Column) -> DataFrame:
    """Return JOURNEY rows. The columns in `known` get the given values. Of the other
    columns, counts are 0, and the rest are null."""
    nothing = dict.fromkeys(("sent_us", *_COUNTS), sf.lit(0))
    return frame.select(
        "message_id",
        "destination",
        *[
            known.get(one.name, nothing.get(one.name, sf.lit(None)))
            .cast(one.dataType)
            .alias(one.name)
            for one in JOURNEY.fields[2:]
        ],
    )


def _one(instant: Column) -> Column:
    return sf.when(instant.isNotNull(), 1).otherwise(0)


def is_topic(destination: Column) -> Column:
    """Return whether a destination is a topic. Null if the destination is null."""
    return destination.startswith(wire.TOPIC_PREFIX)
