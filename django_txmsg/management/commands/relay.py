"""`manage.py relay`: dispatches the outbox until stopped."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from ... import conf
from ...flows.deadlines import Deadlines
from ...monitoring.alerting import Alerting
from ...monitoring.databases import with_only_queues, with_tables
from ...monitoring.periods import Charts
from ...relaying.relay import Relay
from ...scheduling.time_loop import keeping_time, ticked
from ...scheduling.timekeeper import Timekeeper
from ..terminal import positive, read_option, require_tables, say
from ._workers import add_arguments, heartbeat, not_served, working


class Command(BaseCommand):
    """Dispatch stored messages to the broker."""

    help = "Dispatches stored messages until it is stopped (SIGTERM or SIGINT)."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--once", action="store_true", help="end when nothing is due"
        )
        parser.add_argument("--batch-size", type=positive, metavar="N")
        parser.add_argument(
            "--database", action="append", metavar="ALIAS", help="may be repeated"
        )
        parser.add_argument(
            "--broker", action="append", metavar="ALIAS", help="may be repeated"
        )
        add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        databases = options["database"] or with_tables()
        others = "" if options["database"] else not_served(databases)
        if others and options["verbosity"] > 0:
            self.stdout.write(others)
        brokers = options["broker"] or sorted(conf.get().BROKERS)
        unknown = [name for name in brokers if name not in conf.get().BROKERS]
        if unknown:
            raise CommandError(f"No broker {unknown[0]!r} under TXMSG['BROKERS'].")
        require_tables(*databases, *with_only_queues(*brokers), waits=True)
        size = read_option(options, "batch_size", positive)
        relay = Relay(databases, brokers, batch_size=size)
        time_loops = [Timekeeper(databases), Deadlines(databases)]
        with ExitStack() as stack:
            stack.enter_context(working(relay.stop, options, self.stderr))
            stack.enter_context(heartbeat(relay, relay.stop))
            if not options["once"]:
                loops = [*time_loops, Alerting(databases), Charts(databases)]
                stack.enter_context(keeping_time(loops, relay.stop))
            if options["verbosity"] > 0 and not options["once"]:
                self.stderr.write(
                    f"Relaying from {', '.join(databases)} to {', '.join(brokers)}. "
                    f"Stop with Ctrl-C."
                )
            try:
                with ticked(time_loops if options["once"] else []):
                    relay.run(once=options["once"])
            finally:
                if options["verbosity"] > 0:
                    say(self.stdout, _summary(relay))


def _summary(relay: Relay) -> str:
    counts = relay.counts
    sent = counts["dispatched"]
    return (
        f"Dispatched {sent} message{'s' * (sent != 1)}"
        + "".join(
            f", {counts[name]} {name.replace('_', ' ')}"
            for name in ("rejected", "dead", "unknown", "lease_lost")
            if counts[name]
        )
        + "."
    )
