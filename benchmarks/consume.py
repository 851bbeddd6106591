"""The rate of stages, compared with a bare Django loop that does the same three
inserts.

python -m benchmarks.consume [--messages 3000] [--rounds 3] [--broker activemq]
"""

from __future__ import annotations

import argparse
import threading
import time
import uuid
from dataclasses import replace
from typing import Any

from . import stand

DESTINATION = "bench.consume"
BODY = {"order": "A-1", "text": "x" * 260}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="contenders with this in their name")
    parser.add_argument(
        "--broker", default="activemq", choices=["activemq", "rabbitmq"]
    )
    parser.add_argument("--peer", action="store_true")
    options = parser.parse_args()
    from tests import services

    kinds = {"activemq": services.ActiveMQ, "rabbitmq": services.RabbitMQ}
    broker = services.shared(kinds[options.broker])
    stand.django(
        stand.postgresql(),
        {
            "SERVICE": "bench",
            "BROKERS": {"default": {"URL": broker.url()}},
            # What leaves afterwards is the relay's work, and has its own benchmark.
            "DISPATCH_ON_COMMIT": "off",
        },
    )
    count = options.messages
    contenders = {
        "a bare loop: three inserts and a commit": lambda: loop(count),
        "outbox stage, concurrency 1": lambda: consume(count, concurrency=1),
        "outbox stage, three messages": lambda: consume(count, handler=three),
        "outbox stage, three by send_messages": lambda: consume(
            count, handler=three_at_once
        ),
        "outbox stage, concurrency 4": lambda: consume(count, concurrency=4),
        "outbox stage, batch=50, concurrency 1": lambda: consume(count, batch=50),
        "best_effort_1pc stage, concurrency 1": lambda: consume(
            count, transaction="best_effort_1pc"
        ),
    }
    if options.broker == "rabbitmq":
        contenders["outbox stage, while another stage cannot subscribe"] = lambda: (
            consume(count, beside="/exchange/nobody/declares")
        )
    if options.peer:
        contenders["django-outbox-pattern 3.2.1"] = lambda: stand.peer(
            "consume", broker.url(), min(count, 500)
        )
    base = next(iter(contenders))
    chosen = {
        name: run
        for name, run in contenders.items()
        if name == base or options.only in name
    }
    figures = stand.turns(chosen, options.rounds)
    title = f"consume from {options.broker}"
    stand.table(title, figures, base)
    alone, beside = (
        "outbox stage, concurrency 1",
        "outbox stage, while another stage cannot subscribe",
    )
    sends = {
        name: one for name, one in figures.items() if "outbox stage, three" in name
    }
    if alone in figures and sends:
        stand.table("a stage's sends", {alone: figures[alone], **sends}, alone)
    if {alone, beside} <= set(figures):
        pair = {name: figures[name] for name in (alone, beside)}
        stand.table(title, pair, alone, goals={beside: 0.95})


def handler(message: Any) -> None:
    """Insert one business row, and send one message."""
    from django_txmsg import send_message
    from tests.app.models import Effect

    Effect.objects.create(name="placed", message_id=message.id)
    send_message("bench.next", BODY)


def three(message: Any) -> None:
    """Insert one business row, and send three messages one by one."""
    from django_txmsg import send_message

    handler(message)
    for _ in range(2):
        send_message("bench.next", BODY)


def three_at_once(message: Any) -> None:
    """Insert one business row, and store three messages together."""
    from django_txmsg import send_messages
    from tests.app.models import Effect

    Effect.objects.create(name="placed", message_id=message.id)
    send_messages({"destination": "bench.next", "body": BODY} for _ in range(3))


def loop(count: int) -> float:
    """Return the rate of the bare Django loop."""
    from django.db import transaction

    from django_txmsg.models import InboxMessage, OutboxMessage
    from tests.app.models import Effect

    clean()
    began = time.perf_counter()
    for _ in range(count):
        message_id = uuid.uuid4()
        with transaction.atomic():
            InboxMessage.objects.create(
                stage="bench", message_id=message_id, destination=DESTINATION
            )
            Effect.objects.create(name="placed", message_id=str(message_id))
            OutboxMessage.objects.create(
                message_id=uuid.uuid4(),
                destination="bench.next",
                content_type="application/json",
                body=b"x" * 300,
            )
    return count / (time.perf_counter() - began)


def consume(
    count: int,
    concurrency: int = 1,
    handler: Any = handler,
    body: bytes = b'{"n": 1, "text": "%s"}' % (b"x" * 270),
    beside: str = "",
    empty: bool = True,
    **stage: Any,
) -> float:
    """Return the rate at which a stage consumes `count` waiting messages. If `beside`
    is given, another stage runs at the same time. `beside` is the name and the
    destination of that other stage. With `empty`, the tables are emptied first."""
    from django_txmsg import wire
    from django_txmsg.brokers import get_broker
    from django_txmsg.brokers.base import Outgoing
    from django_txmsg.consuming.consumer import Consumer
    from django_txmsg.envelope.handler import accepted, bound
    from django_txmsg.stages import Stage

    if empty:
        clean()
    destination = f"{DESTINATION}.{uuid.uuid4().hex[:8]}"
    with get_broker(stage.get("broker", "default")).open() as session:
        for start in range(0, count, 500):
            session.send(
                [
                    Outgoing(
                        destination,
                        {
                            wire.MESSAGE_ID: str(uuid.uuid4()),
                            wire.CONTENT_TYPE: wire.JSON,
                        },
                        body,
                    )
                    for _ in range(start, min(start + 500, count))
                ]
            )
    declared = Stage(
        name=destination,
        destination=destination,
        handler=bound(handler),
        accepts=accepted(handler),
        concurrency=concurrency,
        **stage,
    )
    others = [replace(declared, name=beside, destination=beside)] if beside else []
    consumer = Consumer([declared, *others])
    thread = threading.Thread(target=consumer.run)
    thread.start()
    while consumer.handled < count * 0.05:
        time.sleep(0.001)
    first, began = consumer.handled, time.perf_counter()
    while consumer.handled < count:
        time.sleep(0.001)
    rate = (count - first) / (time.perf_counter() - began)
    consumer.stop()
    thread.join()
    return rate


def clean() -> None:
    """Empty the tables, so that every run starts with the same database."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "TRUNCATE django_txmsg_inboxmessage, django_txmsg_outboxmessage, app_effect"
        )
        cursor.execute("CHECKPOINT")


if __name__ == "__main__":
    main()
