"""`manage.py relay`: ships the outbox until stopped."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DatabaseError, router

from ... import conf
from ...errors import BrokerUnavailable, ConfigurationError
from ...models import OutboxMessage
from ...relay import Relay
from ...worker import Presence
from ._process import heartbeat, stay_light, stop_on_signals


class Command(BaseCommand):
    """Hand stored messages to the broker."""

    help = "Hands stored messages to the broker until stopped (SIGTERM or SIGINT)."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--once", action="store_true", help="until nothing is due")
        parser.add_argument("--batch-size", type=int, metavar="N")
        parser.add_argument(
            "--database", action="append", metavar="ALIAS", help="may be repeated"
        )
        parser.add_argument(
            "--broker", action="append", metavar="ALIAS", help="may be repeated"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        batch_size = options["batch_size"]
        if batch_size is not None and batch_size < 1:
            raise CommandError("--batch-size must be 1 or more.")
        databases = options["database"] or [router.db_for_write(OutboxMessage)]
        brokers = options["broker"] or sorted(conf.get().BROKERS)
        unknown = [name for name in brokers if name not in conf.get().BROKERS]
        if unknown:
            raise CommandError(f"No broker {unknown[0]!r} under TXMSG['BROKERS'].")
        relay = Relay(databases, brokers, batch_size=batch_size)
        presence = Presence("relay", databases[0])
        if not options["once"]:
            stay_light()
        with stop_on_signals(relay.stop, self.stderr), heartbeat(presence, relay):
            try:
                relay.run(once=options["once"])
            except (BrokerUnavailable, ConfigurationError, DatabaseError) as error:
                raise CommandError(
                    f"The relay ended: {error} What is not dispatched stays in the "
                    f"outbox."
                ) from error
        if options["verbosity"] > 0:
            counts = relay.counts
            self.stdout.write(
                f"Dispatched {counts['dispatched']} messages"
                + "".join(
                    f", {counts[name]} {name.replace('_', ' ')}"
                    for name in ("rejected", "dead", "unknown", "lease_lost")
                    if counts[name]
                )
                + "."
            )
