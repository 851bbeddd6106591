"""`views`: prints SQL views on the findings of `reconcile`.

A view shows the verdict of the last run that judged a message. In the lake, the views
read the journal of findings. In the database, they read the table of findings.
"""

from __future__ import annotations

import argparse

from ...rules import outbox
from ..runs import Run
from ..schemas import INBOX, OUTBOX
from ..spec import JobSpec, LakeSpec

#: The tables of the lake from which its views are made.
_READ = ("verdicts", "reconciliation", "journeys")

#: One row for each finding that stands: the last line of the journal says so.
_FINDINGS = """
SELECT service, message_id, destination, consumer, sender, verdict, sent_at, due_at,
       dispatched_at, received_at, processed_at, deliveries, found_at
FROM (
  SELECT *, row_number() OVER (
    PARTITION BY service, message_id, coalesce(destination, ''),
                 coalesce(consumer, ''), verdict
    ORDER BY recorded_at DESC) AS newest
  FROM txmsg_lake_verdicts WHERE change IS NOT NULL) AS journal
WHERE newest = 1 AND change = 'found'
"""

#: The counts of the last run.
_COUNTS = """
SELECT service, sent_on, destination, verdict, messages, first_sent_at, last_sent_at,
       run_id, recorded_at
FROM (
  SELECT *, dense_rank() OVER (
    PARTITION BY service ORDER BY recorded_at DESC, run_id) AS newest
  FROM txmsg_lake_reconciliation) AS runs
WHERE newest = 1
"""

#: Archived messages, one row for each consumer. A topic's message has a journey for
#: each time it was sent, and one for each consumer that has received it.
_MESSAGES = """
WITH sent AS (
  SELECT service, message_id, destination, min(sender) AS sender,
         min(stored_at) AS sent_at, min(due_at) AS due_at,
         min(dispatched_at) AS dispatched_at
  FROM txmsg_lake_journeys WHERE pair = '' GROUP BY service, message_id, destination
), received AS (
  SELECT service, message_id, destination, pair, consumer, told_at, received_at,
         processed_at, deliveries, cancelled, discarded_at, replaced_at
  FROM txmsg_lake_journeys WHERE pair <> '' OR destination NOT LIKE 'topic:%'
), found AS (
  SELECT *, CASE WHEN destination LIKE 'topic:%' THEN coalesce(consumer, '')
                 ELSE '' END AS pair
  FROM txmsg_findings
)
SELECT coalesce(r.service, f.service) AS service,
       coalesce(r.message_id, f.message_id) AS message_id,
       coalesce(r.destination, f.destination) AS destination,
       coalesce(f.consumer, r.consumer) AS consumer,
       coalesce(s.sender, f.sender) AS sender,
       coalesce(s.sent_at, f.sent_at, r.told_at) AS sent_at,
       coalesce(s.due_at, f.due_at) AS due_at,
       coalesce(s.dispatched_at, f.dispatched_at) AS dispatched_at,
       coalesce(r.received_at, f.received_at) AS received_at,
       coalesce(r.processed_at, f.processed_at) AS processed_at,
       coalesce(r.deliveries, f.deliveries) AS deliveries,
       CASE WHEN f.verdict IS NOT NULL THEN f.verdict
            WHEN r.processed_at IS NOT NULL AND r.deliveries > 1
              THEN 'redelivered_deduplicated'
            WHEN r.processed_at IS NOT NULL THEN 'ok'
            WHEN r.cancelled > 0 THEN 'cancelled'
            WHEN r.discarded_at IS NOT NULL THEN 'discarded'
            WHEN r.replaced_at IS NOT NULL THEN 'replaced' END AS verdict,
       f.found_at AS found_at
FROM received AS r
FULL OUTER JOIN found AS f ON f.service = r.service AND f.message_id = r.message_id
  AND f.destination = r.destination AND f.pair = r.pair
LEFT JOIN sent AS s ON s.service = coalesce(r.service, f.service)
  AND s.message_id = coalesce(r.message_id, f.message_id)
  AND s.destination = coalesce(r.destination, f.destination)
"""

#: Whether a finding is about a row of the inbox.
_SAME = """f.message_id = i.message_id AND f.destination = i.destination
    AND (i.destination NOT LIKE 'topic:%'
         OR f.consumer = f.service || '/' || i.stage)"""

#: Messages in a database, one row for each consumer that its own inbox, or a finding,
#: knows.
_LIVE = f"""
WITH known AS (
  SELECT i.message_id, i.destination, i.stage, i.first_received_at, i.processed_at,
         i.deliveries, f.consumer, f.verdict, f.found_at, f.acknowledged_at
  FROM {INBOX.relation} i LEFT JOIN django_txmsg_finding f ON {_SAME}
  UNION ALL
  SELECT f.message_id, f.destination, NULL, NULL, NULL,
         NULL, f.consumer, f.verdict, f.found_at, f.acknowledged_at
  FROM django_txmsg_finding f
  WHERE NOT EXISTS (SELECT 1 FROM {INBOX.relation} i WHERE {_SAME})
)
SELECT o.message_id, o.destination, o.key, o.correlation_id, o.created_at, o.due_at,
       o.dispatched_at, o.attempts,
       CASE WHEN {outbox.CANCELLED.sql("o")} THEN 'cancelled'
            WHEN {outbox.DEAD.sql("o")} THEN 'dead'
            WHEN {outbox.DISPATCHED.sql("o")} THEN 'dispatched'
            ELSE 'pending' END AS state,
       k.stage, k.first_received_at, k.processed_at, k.deliveries, k.consumer,
       k.verdict, k.found_at, k.acknowledged_at
FROM {OUTBOX.relation} o
LEFT JOIN known k ON k.message_id = o.message_id AND k.destination = o.destination
"""


def spark_tables(lake: LakeSpec) -> list[str]:
    """Return the statements that make the lake's tables available in a Spark session.
    They contain no secret options of the object store: these come from the
    environment."""
    options = {"lake": lake.uri, **{
        f"storage.{name}": value
        for name, value in lake.public().storage_options.items()
    }}  # fmt: skip
    given = ", ".join(f"'{name}' {_quoted(value)}" for name, value in options.items())
    return [
        f"CREATE OR REPLACE TEMPORARY VIEW txmsg_lake_{name} USING txmsg "
        f"OPTIONS ({given}, 'table' '{name}')"
        for name in _READ
    ]


def views_command(spec: JobSpec, given: argparse.Namespace, run: Run) -> None:
    """Print the statements that create the views. Raises UsageError if
    no lake is specified."""
    if given.of == "database":
        # It works on PostgreSQL and SQLite.
        said = [
            "DROP VIEW IF EXISTS txmsg_messages",
            f"CREATE VIEW txmsg_messages AS{_LIVE.rstrip()}",
        ]
    else:
        # Other tools than Spark name the lake's tables by means of their own.
        said = spark_tables(spec.lake_spec()) if given.of == "lake" else []
        said += [
            f"CREATE OR REPLACE TEMPORARY VIEW txmsg_{name} AS{query.rstrip()}"
            for name, query in (
                ("findings", _FINDINGS),
                ("counts", _COUNTS),
                ("messages", _MESSAGES),
            )
        ]
    run.rows = len(said)
    run.lines, run.facts = [f"{one};" for one in said], {"statements": said}


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
