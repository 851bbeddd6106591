"""Creates all of the app's tables. On PostgreSQL, also creates BRIN and Bloom indexes
and sets the tables' autovacuum options."""

from __future__ import annotations

import datetime
from typing import Any

import django.db.models.deletion
import django.db.models.functions.comparison
import django.db.models.functions.datetime
import django.db.models.lookups
import django_txmsg.models.fields
from django.db import migrations, models

# A claim leaves a dead row version behind: room for it on the same page keeps it out
# of the indexes, and an early vacuum keeps the index of pending rows short.
FRUGAL = """
    ALTER TABLE {table} SET (
        fillfactor = 50,
        autovacuum_vacuum_scale_factor = 0.02,
        autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_limit = 2000
    );
"""
CLAIMED = (
    "django_txmsg_outboxmessage",
    "django_txmsg_inboxmessage",
    "django_txmsg_keytail",
)
# The two large ones are analysed early as well.
ANALYZED = "ALTER TABLE {table} SET (autovacuum_analyze_scale_factor = 0.05);"
LARGE = ("django_txmsg_outboxmessage", "django_txmsg_inboxmessage")

# The operator's pages ask what happened since some instant; they get no B-tree for it.
# The inbox has it on the last receipt and not on the end, which would cost the update
# that ends a message its place on the page. `late_at` finds what ended much later.
BRIN = """
    CREATE INDEX {table}_{column} ON {table} USING brin ({column})
        WITH (pages_per_range = 32, autosummarize = on);
"""
SINCE = (
    ("django_txmsg_outboxmessage", "created_at"),
    ("django_txmsg_outboxmessage", "dispatched_at"),
    ("django_txmsg_inboxmessage", "last_received_at"),
    ("django_txmsg_deadletter", "created_at"),
)

# A filter of the operator's lists by something rare would read the whole table.
BLOOM = """
    CREATE INDEX {table}_{column} ON {table} USING brin ({column} text_bloom_ops)
        WITH (pages_per_range = 32, autosummarize = on);
"""
RARE = (
    ("django_txmsg_outboxmessage", "destination"),
    ("django_txmsg_outboxmessage", "key"),
    ("django_txmsg_inboxmessage", "stage"),
)


def fit_postgresql(apps: Any, schema_editor: Any) -> None:
    """Run the PostgreSQL statements for which Django has no operation."""
    if schema_editor.connection.vendor != "postgresql":
        return
    for table in CLAIMED:
        schema_editor.execute(FRUGAL.format(table=table))
    for table in LARGE:
        schema_editor.execute(ANALYZED.format(table=table))
    for sql, columns in ((BRIN, SINCE), (BLOOM, RARE)):
        for table, column in columns:
            schema_editor.execute(sql.format(table=table, column=column))


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="DatabaseIdentity",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("identity", models.CharField(max_length=255, unique=True)),
                (
                    "seen_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
            ],
            options={
                "verbose_name_plural": "database identities",
            },
        ),
        migrations.CreateModel(
            name="FailureNote",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("fingerprint", models.CharField(max_length=64, unique=True)),
                ("note", models.TextField(default="")),
                ("muted", models.BooleanField(default=False)),
                (
                    "muted_until",
                    models.DateTimeField(null=True),
                ),
                (
                    "muted_above",
                    models.PositiveIntegerField(null=True),
                ),
                ("noted_by", models.CharField(default="", max_length=255)),
                (
                    "noted_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="StageState",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("stage", models.CharField(max_length=255, unique=True)),
                ("paused_at", models.DateTimeField(null=True)),
                ("paused_by", models.CharField(default="", max_length=255)),
                (
                    "paused_why",
                    models.CharField(default="", max_length=255),
                ),
                (
                    "ordered_since",
                    models.DateTimeField(
                        help_text="Since when the stage is ordered in this database.",
                        null=True,
                    ),
                ),
                (
                    "full_since",
                    models.DateTimeField(
                        help_text="Since when it receives nothing, because too many messages wait.",
                        null=True,
                    ),
                ),
                (
                    "rate",
                    models.CharField(
                        db_default="",
                        default="",
                        help_text="The rate that an operator has set, while it holds.",
                        max_length=32,
                    ),
                ),
                ("rate_until", models.DateTimeField(null=True)),
                (
                    "rate_by",
                    models.CharField(db_default="", default="", max_length=255),
                ),
            ],
            options={
                "verbose_name": "stage",
                "permissions": [
                    ("pause_stage", "Can pause and resume stages"),
                    ("limit_stage", "Can change the rate of a stage for a while"),
                ],
            },
        ),
        migrations.CreateModel(
            name="StopRequest",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                (
                    "at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                ("stage", models.CharField(max_length=255)),
                ("message_id", models.UUIDField()),
                ("why", models.CharField(max_length=255)),
            ],
        ),
        migrations.CreateModel(
            name="TaskRun",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("message_id", models.UUIDField(unique=True)),
                ("workers", models.JSONField(default=list)),
                ("result", models.JSONField(null=True)),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                ("finished_at", models.DateTimeField(null=True)),
            ],
        ),
        migrations.CreateModel(
            name="Worker",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("name", models.CharField(max_length=255, unique=True)),
                ("kind", models.CharField(max_length=16)),
                (
                    "service",
                    models.CharField(db_default="", default="", max_length=255),
                ),
                (
                    "version",
                    models.CharField(db_default="", default="", max_length=255),
                ),
                ("host", models.CharField(max_length=255)),
                ("pid", models.PositiveIntegerField()),
                ("stages", models.JSONField(default=list)),
                (
                    "outages",
                    models.JSONField(
                        db_default=models.Value([], output_field=models.JSONField()),
                        default=list,
                        help_text="What the process cannot use: brokers, destinations, subscriptions, databases, each with the error.",
                    ),
                ),
                (
                    "running",
                    models.JSONField(
                        db_default=models.Value([], output_field=models.JSONField()),
                        default=list,
                        help_text="What handlers of the process were processing at the heartbeat.",
                    ),
                ),
                ("in_flight", models.PositiveIntegerField(default=0)),
                (
                    "started_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                (
                    "heartbeat_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                (
                    "silent_after",
                    models.DurationField(
                        db_default=datetime.timedelta(seconds=30),
                        default=datetime.timedelta(seconds=30),
                        help_text="Age of the last heartbeat at which the worker counts as dead.",
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="Alert",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("service", models.CharField(max_length=255)),
                ("name", models.CharField(max_length=255)),
                ("kind", models.CharField(max_length=32)),
                ("text", models.TextField(default="")),
                (
                    "since",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                ("ended_at", models.DateTimeField(null=True)),
                (
                    "delivered",
                    models.CharField(
                        default="",
                        help_text="What its receivers know.",
                        max_length=16,
                    ),
                ),
                ("lease_until", models.DateTimeField(null=True)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(("ended_at__isnull", True)),
                        fields=("service", "name"),
                        name="txmsg_alert_open",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Attempt",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("message_id", models.UUIDField()),
                ("stage", models.CharField(max_length=255)),
                ("number", models.PositiveIntegerField()),
                ("worker", models.CharField(default="", max_length=255)),
                (
                    "failed_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                (
                    "duration",
                    models.FloatField(null=True),
                ),
                ("exception", models.TextField(default="")),
                ("traceback", models.TextField(default="")),
                (
                    "fingerprint",
                    models.CharField(default="", max_length=64),
                ),
            ],
            options={
                "indexes": [
                    models.Index(
                        fields=["message_id", "stage"], name="txmsg_attempt_message"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="BulkOperation",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                (
                    "kind",
                    models.CharField(
                        choices=[
                            ("redeliver", "redeliver"),
                            ("discard", "discard"),
                            ("restore", "restore"),
                            ("go-back", "go back"),
                        ],
                        max_length=16,
                    ),
                ),
                ("filter", models.JSONField(default=dict)),
                ("force", models.BooleanField(default=False)),
                ("by", models.CharField(default="", max_length=255)),
                ("why", models.CharField(default="", max_length=255)),
                (
                    "rate",
                    models.FloatField(null=True),
                ),
                (
                    "tolerates",
                    models.PositiveIntegerField(null=True),
                ),
                (
                    "watched",
                    models.JSONField(
                        db_default=models.Value([], output_field=models.JSONField()),
                        default=list,
                    ),
                ),
                (
                    "stopped_why",
                    models.TextField(db_default="", default=""),
                ),
                ("total", models.PositiveIntegerField(default=0)),
                ("done", models.PositiveIntegerField(default=0)),
                ("skipped", models.PositiveIntegerField(default=0)),
                (
                    "skipped_why",
                    models.JSONField(default=dict),
                ),
                ("cursor", models.BigIntegerField(default=0)),
                ("up_to", models.BigIntegerField(default=0)),
                ("batch_size", models.PositiveIntegerField(default=100)),
                (
                    "state",
                    models.CharField(
                        choices=[
                            ("running", "running"),
                            ("paused", "paused"),
                            ("cancelled", "cancelled"),
                            ("done", "done"),
                        ],
                        default="running",
                        max_length=16,
                    ),
                ),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                (
                    "due_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                (
                    "changed_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                ("finished_at", models.DateTimeField(null=True)),
                ("last_error", models.TextField(default="")),
            ],
            options={
                "indexes": [
                    models.Index(
                        condition=models.Q(("state", "running")),
                        fields=["due_at"],
                        name="txmsg_bulk_due",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="AuditEntry",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                (
                    "at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                ("by", models.CharField(max_length=255)),
                ("deed", models.CharField(max_length=16)),
                ("text", models.TextField()),
                (
                    "count",
                    models.BigIntegerField(
                        help_text="How many the operator was shown.",
                        null=True,
                    ),
                ),
                (
                    "operation",
                    models.ForeignKey(
                        help_text="The bulk operation, which counts how many are done.",
                        null=True,
                        on_delete=django.db.models.deletion.SET_NULL,
                        related_name="+",
                        to="django_txmsg.bulkoperation",
                    ),
                ),
            ],
            options={
                "verbose_name_plural": "audit entries",
                "indexes": [models.Index(fields=["at"], name="txmsg_audit_at")],
            },
        ),
        migrations.CreateModel(
            name="DeadLetter",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("message_id", models.UUIDField()),
                ("stage", models.CharField(default="", max_length=255)),
                ("broker", models.CharField(default="default", max_length=64)),
                ("destination", models.CharField(max_length=255)),
                (
                    "correlation_id",
                    models.CharField(default="", max_length=255),
                ),
                ("headers", models.JSONField(default=dict)),
                (
                    "content_type",
                    models.CharField(default="", max_length=255),
                ),
                ("body", models.BinaryField()),
                ("reason", models.CharField(max_length=64)),
                ("exception", models.TextField(default="")),
                ("traceback", models.TextField(default="")),
                (
                    "fingerprint",
                    models.CharField(default="", max_length=64),
                ),
                ("attempts", models.PositiveIntegerField(default=0)),
                (
                    "deaths",
                    models.PositiveIntegerField(default=1),
                ),
                ("message_created_at", models.DateTimeField(null=True)),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                (
                    "resolution",
                    models.CharField(
                        choices=[
                            ("open", "open"),
                            ("redelivered", "redelivered"),
                            ("replaced", "replaced by a copy"),
                            ("discarded", "discarded"),
                        ],
                        default="open",
                        max_length=16,
                    ),
                ),
                ("resolved_at", models.DateTimeField(null=True)),
                (
                    "resolved_by",
                    models.CharField(default="", max_length=255),
                ),
                (
                    "replaced_by",
                    models.UUIDField(null=True),
                ),
                (
                    "operation",
                    models.BigIntegerField(null=True),
                ),
            ],
            options={
                "permissions": [
                    ("redeliver_deadletter", "Can redeliver dead letters"),
                    (
                        "edit_deadletter",
                        "Can redeliver an edited copy of a dead letter",
                    ),
                    ("discard_deadletter", "Can discard and restore dead letters"),
                    ("export_deadletter", "Can export dead letters, without bodies"),
                    ("view_message_body", "Can view message bodies"),
                ],
                "indexes": [
                    models.Index(
                        fields=["message_id", "stage"], name="txmsg_dead_message"
                    ),
                    models.Index(
                        condition=models.Q(("resolution", "open")),
                        fields=["id"],
                        name="txmsg_dead_open",
                    ),
                    models.Index(
                        condition=models.Q(("resolution", "open"), _negated=True),
                        fields=["resolution", "id"],
                        name="txmsg_dead_resolved",
                    ),
                    models.Index(
                        condition=models.Q(("deaths__gt", 1)),
                        fields=["id"],
                        name="txmsg_dead_again",
                    ),
                    models.Index(
                        condition=models.Q(
                            ("operation__isnull", False), ("resolution", "open")
                        ),
                        fields=["operation"],
                        name="txmsg_dead_operation",
                    ),
                    models.Index(
                        condition=models.Q(("resolution", "open")),
                        fields=[
                            "fingerprint",
                            "id",
                            "stage",
                            "destination",
                            "reason",
                            "created_at",
                            "deaths",
                        ],
                        name="txmsg_dead_groups",
                    ),
                    models.Index(
                        condition=models.Q(("correlation_id", ""), _negated=True),
                        fields=["correlation_id"],
                        name="txmsg_dead_correlation",
                    ),
                    models.Index(
                        fields=["fingerprint", "created_at"], name="txmsg_dead_error"
                    ),
                    models.Index(
                        django_txmsg.models.fields.MessageKey("headers"),
                        name="txmsg_dead_key",
                    ),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(
                            ("resolution", "open"),
                            ("resolved_at__isnull", False),
                            _connector="OR",
                        ),
                        name="txmsg_dead_letter_resolved_when",
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="IdempotencyKey",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("caller", models.CharField(max_length=255)),
                ("key", models.CharField(max_length=255)),
                (
                    "fingerprint",
                    models.CharField(
                        help_text="Digest of method, path and body: a key is for one request.",
                        max_length=64,
                    ),
                ),
                (
                    "status_code",
                    models.PositiveSmallIntegerField(null=True),
                ),
                ("headers", models.JSONField(default=list)),
                (
                    "body",
                    models.BinaryField(
                        help_text="Empty for a streaming response.",
                        null=True,
                    ),
                ),
                (
                    "session_id",
                    models.UUIDField(
                        help_text="The session under which its messages are stored.",
                        null=True,
                    ),
                ),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
            ],
            options={
                "indexes": [
                    models.Index(fields=["created_at"], name="txmsg_idempotency_when")
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("caller", "key"), name="txmsg_idempotency_key"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="InboxMessage",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("stage", models.CharField(max_length=255)),
                ("message_id", models.UUIDField()),
                ("destination", models.CharField(max_length=255)),
                (
                    "correlation_id",
                    models.CharField(default="", max_length=255),
                ),
                (
                    "service",
                    models.CharField(default="", max_length=255),
                ),
                (
                    "created_at",
                    models.DateTimeField(null=True),
                ),
                ("deliveries", models.PositiveIntegerField(default=1)),
                (
                    "attempts",
                    models.PositiveIntegerField(default=0),
                ),
                (
                    "first_received_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                (
                    "last_received_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                (
                    "started_at",
                    models.DateTimeField(null=True),
                ),
                ("processed_at", models.DateTimeField(null=True)),
                (
                    "late_at",
                    models.DateTimeField(null=True),
                ),
                ("dead_at", models.DateTimeField(null=True)),
                (
                    "revoked_at",
                    models.DateTimeField(null=True),
                ),
                (
                    "due_at",
                    models.DateTimeField(null=True),
                ),
                ("lease_until", models.DateTimeField(null=True)),
                ("lease_token", models.UUIDField(null=True)),
                ("headers", models.JSONField(null=True)),
                ("body", models.BinaryField(null=True)),
                ("last_error", models.TextField(default="")),
                (
                    "needs_type",
                    models.CharField(db_default="", max_length=255),
                ),
                (
                    "needs_version",
                    models.PositiveIntegerField(null=True),
                ),
                (
                    "key",
                    models.CharField(db_default="", max_length=255),
                ),
                (
                    "waits_for",
                    models.UUIDField(null=True),
                ),
                ("waits_since", models.DateTimeField(null=True)),
                (
                    "after_at",
                    models.DateTimeField(null=True),
                ),
                (
                    "slot",
                    models.BigIntegerField(null=True),
                ),
            ],
            options={
                "permissions": [
                    (
                        "stop_inboxmessage",
                        "Can stop messages that a handler is processing",
                    )
                ],
                "indexes": [
                    models.Index(
                        condition=models.Q(("due_at__isnull", False)),
                        fields=["stage", "due_at", "id"],
                        name="txmsg_inbox_parked",
                    ),
                    models.Index(
                        condition=models.Q(
                            ("due_at__isnull", False), ("needs_version__isnull", False)
                        ),
                        fields=["stage", "first_received_at"],
                        name="txmsg_inbox_newer",
                    ),
                    models.Index(
                        condition=models.Q(("waits_for__isnull", False)),
                        fields=["stage", "waits_for"],
                        name="txmsg_inbox_waits",
                    ),
                    models.Index(
                        condition=models.Q(("key", ""), _negated=True),
                        fields=["stage", "key", "after_at"],
                        name="txmsg_inbox_key",
                    ),
                    models.Index(
                        condition=models.Q(("dead_at__isnull", False)),
                        fields=["dead_at"],
                        name="txmsg_inbox_dead",
                    ),
                    models.Index(
                        condition=models.Q(("late_at__isnull", False)),
                        fields=["late_at"],
                        name="txmsg_inbox_late",
                    ),
                    models.Index(
                        condition=models.Q(("correlation_id", ""), _negated=True),
                        fields=["correlation_id"],
                        name="txmsg_inbox_correlation",
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("message_id", "stage"), name="txmsg_inbox_message"
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("processed_at__isnull", True),
                            ("dead_at__isnull", True),
                            _connector="OR",
                        ),
                        name="txmsg_inbox_one_end",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("due_at__isnull", True),
                            models.Q(
                                ("body__isnull", False),
                                ("dead_at__isnull", True),
                                ("headers__isnull", False),
                                ("processed_at__isnull", True),
                            ),
                            _connector="OR",
                        ),
                        name="txmsg_inbox_parked_is_whole",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="KeyTail",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("broker", models.CharField(max_length=64)),
                ("destination", models.CharField(max_length=255)),
                ("key", models.CharField(max_length=255)),
                ("last_id", models.UUIDField()),
                (
                    "last_at",
                    models.BigIntegerField(),
                ),
                ("previous_id", models.UUIDField(null=True)),
                ("previous_at", models.BigIntegerField(null=True)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("broker", "destination", "key"), name="txmsg_key_tail"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="OutboxMessage",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("message_id", models.UUIDField()),
                (
                    "replay_id",
                    models.CharField(default="", max_length=64),
                ),
                (
                    "service",
                    models.CharField(db_default="", default="", max_length=100),
                ),
                ("broker", models.CharField(default="default", max_length=64)),
                ("destination", models.CharField(max_length=255)),
                ("key", models.CharField(default="", max_length=255)),
                (
                    "correlation_id",
                    models.CharField(default="", max_length=255),
                ),
                (
                    "session_id",
                    models.UUIDField(null=True),
                ),
                ("headers", models.JSONField(default=dict)),
                ("content_type", models.CharField(max_length=255)),
                ("body", models.BinaryField()),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                (
                    "due_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                ("expires_at", models.DateTimeField(null=True)),
                ("attempts", models.PositiveIntegerField(default=0)),
                ("lease_until", models.DateTimeField(null=True)),
                ("lease_token", models.UUIDField(null=True)),
                ("last_error", models.TextField(default="")),
                ("dispatched_at", models.DateTimeField(null=True)),
                ("dead_at", models.DateTimeField(null=True)),
                (
                    "cancelled_at",
                    models.DateTimeField(null=True),
                ),
                (
                    "linked_at",
                    models.DateTimeField(null=True),
                ),
                (
                    "unique_key",
                    models.CharField(max_length=255, null=True),
                ),
                (
                    "unique_until_processed",
                    models.BooleanField(db_default=False),
                ),
            ],
            options={
                "permissions": [
                    ("cancel_outboxmessage", "Can cancel pending messages"),
                    ("reschedule_outboxmessage", "Can reschedule pending messages"),
                ],
                "indexes": [
                    models.Index(
                        condition=models.Q(
                            ("dead_at__isnull", True), ("dispatched_at__isnull", True)
                        ),
                        fields=["broker", "due_at", "id"],
                        name="txmsg_outbox_due",
                    ),
                    models.Index(
                        condition=models.Q(
                            ("dead_at__isnull", True), ("dispatched_at__isnull", True)
                        ),
                        fields=["service", "destination", "due_at"],
                        name="txmsg_outbox_place",
                    ),
                    models.Index(
                        condition=models.Q(
                            models.Q(("key", ""), _negated=True),
                            django.db.models.lookups.IsNull(
                                django.db.models.functions.comparison.Coalesce(
                                    "dispatched_at", "dead_at"
                                ),
                                True,
                            ),
                        ),
                        fields=["key", "id"],
                        name="txmsg_outbox_key",
                    ),
                    models.Index(
                        condition=models.Q(
                            ("dead_at__isnull", True),
                            ("dispatched_at__isnull", True),
                            ("session_id__isnull", False),
                        ),
                        fields=["session_id"],
                        name="txmsg_outbox_session",
                    ),
                    models.Index(
                        condition=models.Q(("correlation_id", ""), _negated=True),
                        fields=["correlation_id"],
                        name="txmsg_outbox_correlation",
                    ),
                    models.Index(
                        condition=models.Q(("dead_at__isnull", False)),
                        fields=["dead_at"],
                        name="txmsg_outbox_dead",
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("message_id", "replay_id"), name="txmsg_outbox_message"
                    ),
                    models.UniqueConstraint(
                        condition=models.Q(
                            ("dead_at__isnull", True), ("unique_key__isnull", False)
                        ),
                        fields=("unique_key",),
                        name="txmsg_outbox_holds_key",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("dispatched_at__isnull", True),
                            ("dead_at__isnull", True),
                            _connector="OR",
                        ),
                        name="txmsg_outbox_one_end",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            ("dead_at__isnull", True),
                            models.Q(("last_error", ""), _negated=True),
                            _connector="OR",
                        ),
                        name="txmsg_outbox_dead_says_why",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="PeriodCount",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("start", models.DateTimeField()),
                ("series", models.CharField(max_length=16)),
                (
                    "place",
                    models.CharField(db_default="", default="", max_length=255),
                ),
                ("count", models.BigIntegerField()),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("start", "series", "place"), name="txmsg_period_count"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="QueueMessage",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("queue", models.CharField(max_length=511)),
                ("headers", models.JSONField(default=dict)),
                ("body", models.BinaryField()),
                (
                    "enqueued_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                (
                    "available_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                ("deliveries", models.PositiveIntegerField(default=0)),
                ("lease_token", models.UUIDField(null=True)),
                (
                    "priority",
                    models.SmallIntegerField(db_default=0),
                ),
            ],
            options={
                "indexes": [
                    models.Index(
                        fields=["queue", "available_at", "id"], name="txmsg_queue_due"
                    ),
                    models.Index(
                        condition=models.Q(("priority", 0), _negated=True),
                        fields=["queue", "-priority", "available_at", "id"],
                        name="txmsg_queue_priority",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="QueueSubscription",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("topic", models.CharField(max_length=255)),
                ("subscriber", models.CharField(max_length=255)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("topic", "subscriber"), name="txmsg_queue_subscription"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="RateLine",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("stage", models.CharField(max_length=255)),
                (
                    "key",
                    models.CharField(max_length=32),
                ),
                (
                    "origin",
                    models.FloatField(),
                ),
                (
                    "period",
                    models.FloatField(),
                ),
                ("taken", models.BigIntegerField()),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("stage", "key"), name="txmsg_rate_line"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="Run",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                (
                    "run_id",
                    models.UUIDField(unique=True),
                ),
                ("service", models.CharField(max_length=100)),
                ("flow", models.CharField(max_length=200)),
                ("key", models.CharField(default="", max_length=255)),
                (
                    "version",
                    models.PositiveIntegerField(),
                ),
                ("state", models.TextField()),
                (
                    "step",
                    models.CharField(max_length=200),
                ),
                (
                    "reads",
                    models.TextField(default=""),
                ),
                (
                    "otherwise",
                    models.CharField(default="", max_length=200),
                ),
                (
                    "turn",
                    models.UUIDField(null=True),
                ),
                (
                    "waits_for",
                    models.CharField(
                        choices=[
                            ("start", "its first step"),
                            ("answer", "an answer"),
                            ("resume", "resume()"),
                            ("time", "an instant"),
                            ("itself", "a transaction of its own"),
                            ("join", "several answers"),
                            ("undo", "an undo"),
                            ("", "nothing"),
                        ],
                        default="",
                        max_length=16,
                    ),
                ),
                (
                    "asked",
                    models.CharField(default="", max_length=255),
                ),
                ("request_id", models.UUIDField(null=True)),
                (
                    "since",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                (
                    "due_at",
                    models.DateTimeField(null=True),
                ),
                (
                    "resumed_at",
                    models.DateTimeField(null=True),
                ),
                (
                    "failing",
                    models.BooleanField(default=False),
                ),
                (
                    "undos",
                    models.PositiveIntegerField(default=0),
                ),
                (
                    "kept_undos",
                    models.PositiveIntegerField(null=True),
                ),
                ("answer", models.TextField(default="")),
                (
                    "answer_type",
                    models.CharField(default="", max_length=255),
                ),
                (
                    "outcome",
                    models.CharField(
                        choices=[
                            ("", "open"),
                            ("answered", "answered"),
                            ("failed", "failed, and undone"),
                            ("handed_over", "handed over"),
                        ],
                        default="",
                        max_length=16,
                    ),
                ),
                (
                    "caller",
                    models.JSONField(default=dict),
                ),
                (
                    "first_run",
                    models.UUIDField(),
                ),
                ("hop", models.PositiveIntegerField(default=0)),
                ("baggage", models.JSONField(default=dict)),
                (
                    "correlation_id",
                    models.CharField(default="", max_length=255),
                ),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                ("ended_at", models.DateTimeField(null=True)),
            ],
            options={
                "verbose_name": "run of a flow",
                "verbose_name_plural": "runs of flows",
                "permissions": [
                    ("resume_run", "Can resume runs of flows"),
                    ("time_out_run", "Can let the deadlines of runs pass now"),
                    ("cancel_run", "Can cancel runs of flows"),
                    ("answer_run", "Can answer requests of runs as failed"),
                    ("go_back_run", "Can let runs go back to a step"),
                ],
                "indexes": [
                    models.Index(
                        condition=models.Q(("due_at__isnull", False)),
                        fields=["service", "flow", "due_at"],
                        name="txmsg_run_due",
                    ),
                    models.Index(fields=["flow", "key"], name="txmsg_run_key"),
                    models.Index(
                        condition=models.Q(("ended_at__isnull", False)),
                        fields=["ended_at"],
                        name="txmsg_run_ended",
                    ),
                    models.Index(
                        condition=models.Q(("ended_at__isnull", True)),
                        fields=["service", "flow"],
                        name="txmsg_run_open",
                    ),
                    models.Index(
                        condition=models.Q(
                            ("ended_at__isnull", True), ("failing", True)
                        ),
                        fields=["service", "flow"],
                        name="txmsg_run_undoing",
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        condition=models.Q(
                            ("ended_at__isnull", True),
                            models.Q(("key", ""), _negated=True),
                        ),
                        fields=("service", "flow", "key"),
                        name="txmsg_run_open_key",
                    ),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(
                                ("ended_at__isnull", True), ("turn__isnull", False)
                            ),
                            models.Q(
                                ("due_at__isnull", True),
                                ("ended_at__isnull", False),
                                ("turn__isnull", True),
                            ),
                            _connector="OR",
                        ),
                        name="txmsg_run_ends_once",
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="FlowStep",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("step", models.CharField(max_length=200)),
                (
                    "message_id",
                    models.UUIDField(),
                ),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                ("version", models.PositiveIntegerField()),
                ("state", models.TextField()),
                (
                    "then",
                    models.CharField(default="", max_length=300),
                ),
                (
                    "undos",
                    models.PositiveIntegerField(db_default=0, default=0),
                ),
                (
                    "left",
                    models.BooleanField(db_default=False, default=False),
                ),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="steps",
                        to="django_txmsg.run",
                    ),
                ),
            ],
            options={
                "verbose_name": "step of a run",
                "verbose_name_plural": "steps of runs",
            },
        ),
        migrations.CreateModel(
            name="Batch",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                (
                    "turn",
                    models.UUIDField(unique=True),
                ),
                (
                    "total",
                    models.PositiveIntegerField(),
                ),
                (
                    "enough",
                    models.PositiveIntegerField(),
                ),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="batches",
                        to="django_txmsg.run",
                    ),
                ),
            ],
            options={
                "verbose_name_plural": "batches",
            },
        ),
        migrations.CreateModel(
            name="Schedule",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("service", models.CharField(max_length=255)),
                ("name", models.CharField(max_length=255)),
                (
                    "timing",
                    models.CharField(
                        default="",
                        help_text="The expression and time zone of the last tick.",
                        max_length=255,
                    ),
                ),
                (
                    "last_tick",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                (
                    "moves",
                    models.PositiveBigIntegerField(
                        default=0, help_text="How often the last tick was advanced."
                    ),
                ),
                (
                    "made",
                    models.JSONField(
                        help_text="The arguments of a message that was made at run time.",
                        null=True,
                    ),
                ),
                ("paused_at", models.DateTimeField(null=True)),
                ("paused_by", models.CharField(default="", max_length=255)),
                (
                    "paused_why",
                    models.CharField(default="", max_length=255),
                ),
            ],
            options={
                "verbose_name": "recurring message",
                "permissions": [
                    ("pause_schedule", "Can pause and resume recurring messages"),
                    ("make_schedule", "Can make and remove recurring messages"),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("service", "name"), name="txmsg_schedule_name"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="SessionRecord",
            fields=[
                ("session_id", models.UUIDField(primary_key=True, serialize=False)),
                (
                    "status",
                    models.CharField(
                        choices=[("committed", "committed"), ("tombstone", "given up")],
                        max_length=16,
                    ),
                ),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
            ],
            options={
                "indexes": [
                    models.Index(fields=["created_at"], name="txmsg_session_created")
                ],
            },
        ),
        migrations.CreateModel(
            name="Branch",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("number", models.PositiveIntegerField()),
                ("destination", models.CharField(max_length=255)),
                ("request_id", models.UUIDField()),
                ("answer", models.BinaryField(default=b"")),
                (
                    "content_type",
                    models.CharField(default="", max_length=255),
                ),
                (
                    "answer_type",
                    models.CharField(default="", max_length=255),
                ),
                (
                    "failed",
                    models.BooleanField(default=False),
                ),
                (
                    "left",
                    models.BooleanField(default=False),
                ),
                ("answered_at", models.DateTimeField(null=True)),
                (
                    "batch",
                    models.ForeignKey(
                        db_index=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="branches",
                        to="django_txmsg.batch",
                    ),
                ),
            ],
            options={
                "verbose_name": "branch of a batch",
                "verbose_name_plural": "branches of batches",
                "indexes": [
                    models.Index(
                        condition=models.Q(("answered_at__isnull", True)),
                        fields=["batch", "number"],
                        name="txmsg_branch_open",
                    ),
                    models.Index(
                        condition=models.Q(("failed", True)),
                        fields=["batch"],
                        name="txmsg_branch_failed",
                    ),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("batch", "number"), name="txmsg_branch_number"
                    )
                ],
            },
        ),
        migrations.CreateModel(
            name="FlowUndo",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("number", models.PositiveIntegerField()),
                ("destination", models.CharField(max_length=255)),
                ("body", models.BinaryField()),
                ("body_type", models.CharField(default="", max_length=255)),
                (
                    "request_id",
                    models.UUIDField(null=True),
                ),
                (
                    "created_at",
                    models.DateTimeField(
                        db_default=django.db.models.functions.datetime.Now()
                    ),
                ),
                (
                    "cancels",
                    models.BooleanField(default=False),
                ),
                (
                    "answered",
                    models.BooleanField(default=False),
                ),
                ("confirmed_at", models.DateTimeField(null=True)),
                (
                    "run",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="undo_rows",
                        to="django_txmsg.run",
                    ),
                ),
            ],
            options={
                "verbose_name": "undo of a run",
                "verbose_name_plural": "undos of runs",
                "indexes": [
                    models.Index(
                        condition=models.Q(("request_id__isnull", False)),
                        fields=["request_id"],
                        name="txmsg_undo_request",
                    )
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("run", "number"), name="txmsg_undo_number"
                    )
                ],
            },
        ),
        # Its indexes and options go with the tables.
        migrations.RunPython(fit_postgresql, migrations.RunPython.noop),
    ]
