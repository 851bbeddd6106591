"""`manage.py take_over_outbox_pattern`: migrates from django-outbox-pattern.

The command reads django-outbox-pattern's tables directly, so that package need not be
installed. In fact, that package cannot be installed beside our STOMP client, because it
requires an older stomp.py.
"""

from __future__ import annotations

import argparse
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from django.apps.registry import Apps
from django.core.management.base import CommandError
from django.db import connections, models, transaction
from django.db.models.functions import Now

from ... import conf, signals, wire
from ...envelope.message import carried, check_destination
from ...errors import DuplicateMessage, InvalidMessage
from ...models import InboxMessage, OutboxMessage
from ...relaying import dispatcher
from ...sending.outbox import send_message
from ...stages import Stage, all_stages
from ..terminal import DatabaseCommand, chosen_database, positive, read_option

FAILED, SCHEDULED, SUCCEEDED = -1, 1, 2
_APPS = Apps()  # no tables of ours: no migration is made for them


class _Row(models.Model):
    """The columns that both tables of django-outbox-pattern have."""

    id = models.UUIDField(primary_key=True)
    headers = models.JSONField(null=True)
    added = models.DateTimeField()
    status = models.IntegerField()

    class Meta:
        abstract = True
        apps = _APPS
        app_label = "django_outbox_pattern"
        managed = False

    def __str__(self) -> str:
        return str(self.pk)


class Published(_Row):
    """The table of messages that django-outbox-pattern stored for sending."""

    destination = models.CharField(max_length=255)
    body = models.JSONField()
    expires_at = models.DateTimeField()

    class Meta(_Row.Meta):
        db_table = "published"


class Received(_Row):
    """The table of messages that django-outbox-pattern has processed. A redelivery of
    such a message must not be processed again."""

    msg_id = models.CharField(max_length=100, null=True)  # noqa: DJ001 - as it is

    class Meta(_Row.Meta):
        db_table = "received"


class Command(DatabaseCommand):
    """Copy the unsent messages of django-outbox-pattern into the outbox, and the ids of
    its received messages into the inbox."""

    help = (
        "Copies the unsent messages of django-outbox-pattern into the outbox, and the "
        "ids of its received messages into the inbox. May be repeated."
    )

    renamed: dict[str, str]
    #: By destination, and by the fault.
    strange: Counter[str]
    refused: Counter[str]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--database", metavar="ALIAS")
        parser.add_argument("--broker", metavar="ALIAS", default="default")
        parser.add_argument(
            "--rename", action="append", default=[], metavar="OLD=NEW",
            help="another name for a destination; may be repeated",
        )  # fmt: skip
        parser.add_argument(
            "--given-up", action="store_true",
            help="send also what it has given up: failed, or past its expires_at",
        )  # fmt: skip
        parser.add_argument("--dry-run", action="store_true")
        parser.add_argument("--batch-size", type=positive, default=500, metavar="N")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["broker"] not in conf.get().BROKERS:
            raise CommandError(f"No broker {options['broker']!r} under BROKERS.")
        if not all("=" in one for one in options["rename"]):
            raise CommandError("--rename takes OLD=NEW.")
        options["batch_size"] = read_option(options, "batch_size", positive)
        using = chosen_database(options, OutboxMessage)
        self.renamed = dict(one.split("=", 1) for one in options["rename"])
        self.strange, self.refused = Counter(), Counter()
        tables = connections[using].introspection.table_names()
        found = [m for m in (Published, Received) if m._meta.db_table in tables]
        if not found:
            raise CommandError(
                f"Database {using!r} has no tables of django-outbox-pattern, "
                f"`published` and `received`. Another one: --database ALIAS."
            )
        would = "Would take" if options["dry_run"] else "Took"
        if Published in found:
            with _undispatched():
                taken, left = self._send(using, options)
            self.stdout.write(
                f"{would} {taken} unsent message{'s' * (taken != 1)} over into the "
                f"outbox."
            )
            if left:
                self.stdout.write(
                    f"{left} that it had given up {'are' if left != 1 else 'is'} left: "
                    f"--given-up takes them too."
                )
        if Received in found:
            known = self._remember(using, options)
            self.stdout.write(
                f"{would} {known} id{'s' * (known != 1)} of received messages over "
                f"into the inbox."
            )
        for error, count in self.refused.most_common():
            self.stderr.write(f"Left where they are: {count}. {error}")
        if self.strange:
            names = ", ".join(f"{n} ({c})" for n, c in self.strange.most_common())
            raise CommandError(
                f"Left where they are, by destination: {names}. Say what each is "
                f"called here with --rename OLD=NEW; ids that were received there "
                f"need a stage that consumes it."
            )
        if self.refused:
            raise CommandError("Not everything can be taken over.")

    def _send(self, using: str, options: dict[str, Any]) -> tuple[int, int]:
        """Store the unsent messages in the outbox and mark them as sent. Each batch is
        one transaction. Return two numbers: the messages that were stored, and the
        messages that django-outbox-pattern had given up and that were not stored."""
        rows: Any = Published._base_manager.using(using)
        given_up = rows.exclude(status=SUCCEEDED).filter(
            models.Q(status=FAILED) | models.Q(expires_at__lt=Now())
        )
        wanted = rows.exclude(status=SUCCEEDED)
        left = 0
        if not options["given_up"]:
            left = given_up.count()
            wanted = rows.filter(status=SCHEDULED, expires_at__gte=Now())
        ids = wanted.order_by("added", "pk").values_list("pk", flat=True)
        taken = 0
        for batch in _batches(list(ids), options["batch_size"]):
            with transaction.atomic(using=using):
                # Its own publisher locks the messages that it is sending: wait for it.
                mine = wanted.filter(pk__in=batch).order_by("added", "pk")
                if connections[using].vendor == "postgresql":
                    mine = mine.select_for_update()
                stored = [row.pk for row in mine if self._store(row, using, options)]
                rows.filter(pk__in=stored).update(status=SUCCEEDED)
                taken += len(stored)
                if options["dry_run"]:
                    transaction.set_rollback(True, using=using)
        return taken, left

    def _store(self, row: Any, using: str, options: dict[str, Any]) -> bool:
        headers = {
            name: value
            for name, value in _headers(row).items()
            if not wire.reserved(name)
        }
        if correlation := headers.get("dop-correlation-id"):
            most = wire.MAX_CORRELATION_ID
            headers[wire.CORRELATION_ID] = carried(correlation, most)
        try:
            destination = check_destination(self._destination(row.destination))
        except InvalidMessage:
            self.strange[row.destination] += 1
            return False
        try:
            send_message(
                destination, row.body, headers=headers,
                message_id=row.pk, using=using, broker=options["broker"],
            )  # fmt: skip
        except DuplicateMessage:
            pass  # as after a restored backup of its table
        except InvalidMessage as error:
            self.refused[str(error)] += 1
            return False
        return True

    def _remember(self, using: str, options: dict[str, Any]) -> int:
        """Record in the inbox that each stage has processed the received messages of
        its destination. Return the number of new records."""
        stages: dict[str, list[Stage]] = {}
        for stage in all_stages():
            stages.setdefault(stage.destination, []).append(stage)
        rows: Any = Received._base_manager.using(using)
        rows = rows.filter(status=SUCCEEDED, msg_id__isnull=False)
        known = 0
        for batch in _batches(
            list(rows.values_list("pk", flat=True)), options["batch_size"]
        ):
            noted: dict[str, list[InboxMessage]] = {}
            for row in rows.filter(pk__in=batch):
                came = _headers(row).get("destination", "")
                destination = self._destination(came)
                consuming = stages.get(destination, [])
                if not consuming:
                    self.strange[came or "unknown"] += 1
                for stage in consuming:
                    noted.setdefault(stage.definition.using, []).append(InboxMessage(
                        stage=stage.name, destination=destination, attempts=1,
                        message_id=_identity(row, stage.broker),
                        first_received_at=row.added, last_received_at=row.added,
                        processed_at=row.added,
                    ))  # fmt: skip
            for alias, received in noted.items():
                inbox = InboxMessage._base_manager.using(alias)
                # Not by counting rows: consumers receive messages meanwhile.
                ids = {one.message_id for one in received}
                there = set(
                    inbox.filter(message_id__in=ids).values_list("message_id", "stage")
                )
                known += len({(one.message_id, one.stage) for one in received} - there)
                if not options["dry_run"]:
                    inbox.bulk_create(received, ignore_conflicts=True)
        return known

    def _destination(self, name: str) -> str:
        """Return our name for a STOMP destination."""
        if name in self.renamed:
            return self.renamed[name]
        for prefix, ours in (("/queue/", ""), ("/topic/", wire.TOPIC_PREFIX)):
            if name.startswith(prefix):
                return ours + name.removeprefix(prefix)
        return name


@contextmanager
def _undispatched() -> Iterator[None]:
    """Leave the rows that the block commits to the relay. The queues may still be those
    of the old release, and the stages of topics have not subscribed yet."""
    signals.messages_committed.disconnect(dispatch_uid=dispatcher.UID)
    try:
        yield
    finally:
        signals.messages_committed.connect(
            dispatcher.on_committed, dispatch_uid=dispatcher.UID
        )


def _headers(row: Any) -> dict[str, str]:
    """Return a row's headers as text. The JSON may contain numbers and nulls."""
    given = row.headers if isinstance(row.headers, dict) else {}
    return {name: str(value) for name, value in given.items() if value is not None}


def _identity(row: Any, broker: str) -> uuid.UUID:
    """Return the id by which a stage recognizes a redelivery of the message."""
    return wire.others_id(broker, _headers(row)) or wire.foreign_id(broker, row.msg_id)


def _batches(ids: list[Any], size: int) -> Iterator[list[Any]]:
    remaining = iter(ids)
    while batch := list(islice(remaining, size)):
        yield batch
