"""The cost of flows. A flow of four steps sends requests to three stages. It is
compared with the same stages without a flow: each sends the next message, and a row
keeps the state.

    python -m benchmarks.flows [--flows 400] [--rounds 3] [--sizes 1,10,60]

Both ways process seven messages per flow, and each message inserts one row of the
application. A size is the size of the state in KiB. The state of a flow has at most 64
KiB.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import consume, stand

#: How many requests each makes, one after the other.
ASKED = 3


@dataclass
class Go:
    """The message that starts a flow."""

    number: int
    size: int


@dataclass
class Ask:
    """A request. `turn` is its number."""

    number: int
    turn: int


@dataclass
class Reply:
    """The answer to a request."""

    number: int
    turn: int


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flows", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="1,10,60", help="of the state, in KiB")
    options = parser.parse_args()
    stand.django(
        stand.postgresql(),
        {
            "SERVICE": "bench",
            "BROKERS": {"default": {"URL": "database://?poll=0.01"}},
            "DISPATCH_ON_COMMIT": "off",
        },
    )
    flow = declare_flow()
    declare_hand()
    for size in map(int, options.sizes.split(",")):
        by_hand, by_flow = "stages chained by hand", "flows of four steps"
        figures = stand.turns(
            {
                by_hand: partial(by_hand_rate, options.flows, size),
                by_flow: partial(flow_rate, flow, options.flows, size),
            },
            options.rounds,
        )
        title = f"flows with a state of {size} KiB"
        stand.table(title, figures, by_hand, "flows/s", goals={by_flow: 0.85})


def effect(name: str) -> None:
    """Insert a row of the application."""
    from tests.app.models import Effect

    Effect.objects.create(name=name, message_id="")


def declare_flow() -> Any:
    """Declare the flow, and the stages that answer its requests."""
    from django_txmsg import Destination, stage
    from django_txmsg.flows import Flow, Next, step

    asked = Destination("bench.asked", Ask, reply=Reply)

    class Four(Flow[Go, int], name="bench.four", within=None):
        number: int = 0
        text: str = ""

        @step
        def start(self, go: Go) -> Next[int]:
            effect("step")
            self.number, self.text = go.number, "x" * 1024 * go.size
            return self.ask(asked, Ask(go.number, 1), then=self.replied)

        @step
        def replied(self, reply: Reply) -> Next[int]:
            effect("step")
            if reply.turn == ASKED:
                return self.number
            return self.ask(asked, Ask(self.number, reply.turn + 1), then=self.replied)

    @stage(asked)
    def answer(ask: Ask) -> Reply:
        effect("asked")
        return Reply(ask.number, ask.turn)

    return Four


def declare_hand() -> None:
    """Declare the stages without a flow: each sends the next message."""
    from django_txmsg import Destination, stage
    from tests.app.models import Order

    go, asked, replied = (
        Destination("hand.four", Go),
        Destination("hand.asked", Ask),
        Destination("hand.replied", Reply),
    )

    @stage(go)
    def begin(body: Go) -> None:
        effect("step")
        Order.objects.create(number=str(body.number), note="x" * 1024 * body.size)
        asked.send(Ask(body.number, 1))

    @stage(replied)
    def go_on(body: Reply) -> None:
        effect("step")
        order = Order.objects.select_for_update().get(number=str(body.number))
        order.save(update_fields=["note"])
        if body.turn == ASKED:
            effect("ended")
        else:
            asked.send(Ask(body.number, body.turn + 1))

    @stage(asked)
    def answer(body: Ask) -> None:
        effect("asked")
        replied.send(Reply(body.number, body.turn))


def flow_rate(flow: Any, count: int, size: int) -> float:
    """Return the number of flows that end per second."""
    from django_txmsg.flows import start
    from django_txmsg.models import Run

    def send() -> None:
        for number in range(count):
            start(flow, Go(number, size))

    return rate(
        count,
        ("bench.four", "bench.four.steps", "bench.asked"),
        send,
        lambda: Run.objects.exclude(ended_at=None).count(),
    )


def by_hand_rate(count: int, size: int) -> float:
    """Return the number of chains that end per second."""
    from django_txmsg import Destination
    from tests.app.models import Effect

    def send() -> None:
        for number in range(count):
            Destination("hand.four", Go).send(Go(number, size))

    return rate(
        count,
        ("hand.four", "hand.replied", "hand.asked"),
        send,
        lambda: Effect.objects.filter(name="ended").count(),
    )


def rate(
    count: int,
    names: tuple[str, ...],
    send: Callable[[], None],
    ended: Callable[[], int],
) -> float:
    """Store the first messages. Run the stages and a relay until all flows or chains
    have ended. Return the rate at which they end."""
    from django.db import transaction

    from django_txmsg import stages
    from django_txmsg.consuming.consumer import Consumer
    from django_txmsg.models import QueueMessage, Run
    from django_txmsg.relaying.relay import Relay
    from tests.app.models import Order

    consume.clean()
    for model in (QueueMessage, Order, Run):
        model.objects.all().delete()
    with transaction.atomic():
        send()
    relay, consumer = (
        Relay(["default"], ["default"]),
        Consumer(stages.find(list(names))),
    )
    threads = [threading.Thread(target=one.run) for one in (relay, consumer)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    while ended() < count:
        time.sleep(0.02)
    found = count / (time.perf_counter() - began)
    for one in (relay, consumer):
        one.stop()
    for thread in threads:
        thread.join()
    return found


if __name__ == "__main__":
    main()
