"""`manage.py subscriptions`: lists and ends subscriptions to topics."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import CommandError
from django.db import router

from ... import conf, wire
from ...brokers import get_broker
from ...brokers.base import Broker
from ...errors import BrokerError
from ...models import AuditEntry, Worker
from ...models.fields import clock
from ...models.monitoring import Deed
from ...models.queue import QueueMessage, queue_name
from ...monitoring import attendance, subscriptions
from ...monitoring.subscriptions import Subscription
from ...monitoring.waiting import capped, in_queues
from ...stages import all_stages
from ..terminal import (
    DatabaseCommand,
    add_actions,
    print_list,
    record,
    require_tables,
    values,
)


class Command(DatabaseCommand):
    """List the embedded broker's subscriptions, or end the subscription of a stage that
    was removed."""

    help = (
        "Lists the subscriptions to the embedded broker's topics, or ends a "
        "subscription on any broker."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        actions = add_actions(parser, {
            "list": "All topics and their subscribers.",
            "remove": "End a subscription, and delete its messages.",
        })  # fmt: skip
        for action in actions.values():
            action.add_argument("--broker", default="default", metavar="ALIAS")
        actions["list"].add_argument("--json", action="store_true")
        add = actions["remove"].add_argument
        add("topic", metavar="TOPIC")
        add("subscriber", metavar="SUBSCRIBER")
        add("--dry-run", action="store_true", help="print how many wait")

    def handle(self, *args: Any, **options: Any) -> None:
        broker = get_broker(options["broker"])
        if options["action"] == "list":
            self._list(broker, options["json"])
        else:
            self._remove(broker, options)

    def _list(self, broker: Broker, as_json: bool) -> None:
        using = _tables_of(broker)
        if using is None:
            raise CommandError(
                f"Broker {broker.alias!r} is a server, and only its own tools list its "
                f"subscriptions: see docs/how-to/several-services.md."
            )
        known = self._known(using)
        waiting = {one.name: one.count for one in in_queues(using)}
        rows = (
            values(one, "topic", "subscriber", "abandoned")
            | {"waiting": waiting.get(one.queue, 0)}
            for one in known
        )
        lines = (
            f"{one.topic} {one.subscriber}: {capped(waiting.get(one.queue, 0))} waiting"
            + (", abandoned" if one.abandoned else "")
            for one in known
        )
        none = "There are no subscriptions."
        print_list(self.stdout, "", rows, lines, none, as_json=as_json)

    def _remove(self, broker: Broker, options: dict[str, Any]) -> None:
        topic, subscriber = options["topic"], options["subscriber"]
        using = _tables_of(broker)
        if using is not None:
            stages = [one for one in all_stages() if one.destination == topic]
            used = [one.subscriber for one in stages]
            known = [one for one in self._known(using) if one.topic == topic]
            used += [one.subscriber for one in known if one.used]
            # A relay may have put messages into its queue while it was being removed.
            lying = QueueMessage.objects.using(using).filter(
                queue=queue_name(topic, subscriber)
            )
            named = {*used, *(one.subscriber for one in known)}
            if subscriber not in named and not lying.exists():
                raise CommandError(f"{subscriber!r} does not subscribe to {topic}.")
        else:
            # A server may allow only one subscription of a name, whatever the topic.
            # At RabbitMQ, a subscription is a queue, so any queue could be deleted.
            used = [one.subscriber for one in all_stages()]
            used += subscriptions.served(_living())
            used += [one.destination for one in all_stages()]
            if (
                wire.is_control(subscriber)
                or wire.is_delay_queue(subscriber)
                or subscriber in conf.get().DEAD_LETTER_DESTINATIONS
            ):
                raise CommandError(
                    f"{subscriber!r} is no subscription, but a queue of control "
                    f"messages, of delayed messages or of the broker's dead letters."
                )
        if subscriber in used:
            raise CommandError(
                f"{subscriber!r} is the subscription or the queue of a stage that is "
                f"declared here, or run by a live process: it would miss messages. "
                f"Remove the stage first, and stop the processes that run it."
            )
        waiting = {one.name: one.count for one in in_queues(using)} if using else {}
        lost = waiting.get(queue_name(topic, subscriber), 0)
        which = f"the subscription {subscriber} to {topic}"
        which += f", with {capped(lost)} messages." if lost else "."
        if options["dry_run"]:
            uncounted = "" if using else " Only the server's tools count its messages."
            self.stdout.write(f"Would remove {which}{uncounted}")
            return
        # First: the messages are deleted in many transactions.
        home = router.db_for_write(AuditEntry)
        record(home, Deed.UNSUBSCRIBE, f"Remove {which}")
        try:
            broker.unsubscribe(topic, subscriber)
        except BrokerError as error:
            raise CommandError(f"It is not removed: {error}") from error
        self.stdout.write(f"Removed {which}")

    def _known(self, using: str) -> list[Subscription]:
        require_tables(using)
        return subscriptions.read(using, _living())


def _living() -> list[Worker]:
    """Return the live workers. The rows of workers may be in another database than the
    broker's tables."""
    home = router.db_for_write(Worker)
    require_tables(home)
    return attendance.read_living(home, clock(home)).living


def _tables_of(broker: Broker) -> str | None:
    """Return the database that stores the broker's subscriptions, or None if the broker
    is not the embedded broker."""
    return broker.stored_in if broker.kind == "database" else None
