"""Measures stages under limits: those of a process, of a rate, of a slow service, and
of competing tenants.

    python -m benchmarks.limits [--part PART] [--rounds 3]

Each part takes at most two minutes on a quiet machine:

- processes: a handler that computes, in one process and in two
- rate: a stage that stays below its rate, compared with the stage without a rate
- window: the largest number of effects of two processes in any minute, compared with
  the rate
- calls: 100 HTTP calls of one second each, by coroutines, with concurrency=100
- tenants: the latency of a small tenant alone, and while another has 100,000 messages
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from . import stand
from .workers import RUN, Bench, Contender

URL = "database://?poll=0.01"
#: Calls in flight together.
CALLS = 100
#: Messages of the large tenant, and of the small one.
MANY, FEW = 100_000, 100
RATE = 3000  # a minute


def main() -> None:
    """Measure the parts, and print their tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, help="one part only")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=1500)
    parser.add_argument("--many", type=int, default=MANY)
    parser.add_argument("--seconds", type=float, default=80.0, help="of `window`")
    options = parser.parse_args()
    if options.part is None:
        for part in PARTS:  # each in a process and a database of its own
            command = [sys.executable, "-m", "benchmarks.limits", "--part", part]
            subprocess.run([*command, *sys.argv[1:]], check=True)
        return
    PARTS[options.part](options)


def processes(options: argparse.Namespace) -> None:
    """Compare one process with two. The handler computes for about 10 ms."""
    count = max(50, options.messages // 4)
    environment = {"BENCH_COMPUTE": "2", "BENCH_URL": URL}
    benches = {
        "one process": Bench(
            "one", Contender("txmsg", [*RUN, "--processes", "1"], environment),
            sys.executable, "",
        ),
        "two processes": Bench(
            "two", Contender("txmsg", [*RUN, "--processes", "2"], environment),
            sys.executable, "",
        ),
    }  # fmt: skip
    contenders = {
        name: (lambda bench=bench: bench.rate(count)["rate"])
        for name, bench in benches.items()
    }
    figures = stand.turns(contenders, options.rounds)
    stand.table(
        "a handler that computes", figures, "one process", goals={"two processes": 1.6}
    )


def rate(options: argparse.Namespace) -> None:
    """Compare a stage that stays below its rate with the same stage without a rate."""
    from django_txmsg.envelope.stage_options import Rate

    from .consume import consume

    embedded()
    high: dict[str, Any] = {"rate": Rate.parse("60000000/m"), "per": "tenant"}
    contenders: dict[str, Callable[[], float]] = {
        "no rate": lambda: consume(options.messages),
        "a rate that is not reached": lambda: consume(options.messages, **high),
        "no rate, concurrency 4": lambda: consume(options.messages, concurrency=4),
        "such a rate, concurrency 4": lambda: consume(
            options.messages, concurrency=4, **high
        ),
    }
    figures = stand.turns(contenders, options.rounds)
    names = list(contenders)
    for base, other in (names[:2], names[2:]):
        pair = {name: figures[name] for name in (base, other)}
        stand.table("a rate", pair, base, goals={other: 0.9})


def window(options: argparse.Namespace) -> None:
    """Run two processes that have more messages than the rate allows. Measure the
    largest number of effects in any minute."""
    environment = {"BENCH_RATE": f"{RATE}/m", "BENCH_URL": URL}
    worker = Contender("txmsg", [*RUN, "--processes", "2"], environment)
    minute = min(60.0, options.seconds * 0.75)
    most = Rated("window", worker, sys.executable, "").most(options.seconds, minute)
    allowed = RATE / 60 * minute
    stand.table(
        f"effects in any {minute:.0f} s",
        {"the rate": [allowed], "two processes": [most]},
        "the rate",
        "messages",
        {"two processes": 1.05},
    )


class Rated(Bench):
    """Two processes that run a stage with a rate."""

    def most(self, seconds: float, width: float) -> int:
        """Return the largest number of effects in any `width` seconds of a run."""
        self._project("enqueue", str(int(RATE / 60 * seconds * 1.1)))
        with self._worker():
            self._wait_for(1, 60)
            time.sleep(seconds)
        (most,) = self._ask(
            "SELECT max(n) FROM (SELECT count(*) OVER (ORDER BY at RANGE BETWEEN"
            f" CURRENT ROW AND interval '{width} s' FOLLOWING) n FROM bench_effect) w"
        )
        return int(most)


def calls(options: argparse.Namespace) -> None:
    """Measure the time from the commit of all messages until the last one is
    processed."""
    embedded()
    import httpx

    from django_txmsg import Message
    from django_txmsg.models import InboxMessage

    clients: list[httpx.AsyncClient] = []

    def measure() -> float:
        with answering() as (address, asked):

            async def call(message: Message) -> None:
                if not clients:
                    limits = httpx.Limits(max_connections=CALLS)
                    clients.append(httpx.AsyncClient(limits=limits, timeout=60))
                (await clients[0].get(address)).raise_for_status()

            with consuming(call, transaction="none", concurrency=CALLS) as stage:
                send(stage, 1)  # loads what a first call loads
                done = InboxMessage.objects.exclude(processed_at=None)
                wait(lambda: done.count() == 1)
                began = time.monotonic()
                send(stage, CALLS)
                wait(lambda: len(asked) > CALLS and done.count() > CALLS)
                return time.monotonic() - began

    figures = [measure() for _ in range(options.rounds)]
    stand.table(
        f"{CALLS} HTTP calls of one second",
        {"one second": [1.0 for _ in figures], f"concurrency={CALLS}": figures},
        "one second",
        "seconds",
        {f"concurrency={CALLS}": 2.0},
    )


def tenants(options: argparse.Namespace) -> None:
    """Compare the latencies of a small tenant, alone and with a large tenant."""
    embedded()
    alone, beside = [], []
    for _ in range(min(2, options.rounds)):
        alone.append(latency(0))
        beside.append(latency(options.many))
    for at, percentile in enumerate(("p50", "p99")):
        figures = {
            "alone": [one[at] for one in alone],
            f"while {options.many:,} others wait": [one[at] for one in beside],
        }
        goals = {f"while {options.many:,} others wait": 2.0} if at else {}
        stand.table(f"a small tenant, {percentile}", figures, "alone", "ms", goals)


def latency(many: int) -> tuple[float, float]:
    """Return percentiles of the time from a small tenant's call until its effect is
    committed. Meanwhile, `many` messages of the large tenant wait."""
    from django.db import connection, transaction

    from django_txmsg import Message, send_message

    began: dict[str, float] = {}
    took: list[float] = []

    def handler(message: Message) -> None:
        if message.headers["tenant"] == "small":
            at = began[str(message.id)]
            transaction.on_commit(lambda: took.append(time.monotonic() - at))

    with consuming(handler, rate="600/m", per="tenant", concurrency=2) as stage:
        if many:
            pile_up(stage, many)
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE django_txmsg_inboxmessage")
        for _ in range(FEW):
            one = uuid.uuid4()
            began[str(one)] = time.monotonic()
            with transaction.atomic():
                send_message(
                    stage.destination, 1, message_id=one, headers={"tenant": "small"}
                )
            time.sleep(0.15)
        wait(lambda: len(took) == FEW)
    ordered = sorted(1000 * one for one in took)
    return ordered[FEW // 2], ordered[int(FEW * 0.99) - 1]


def pile_up(stage: Any, many: int) -> None:
    """Store `many` messages of the large tenant. Each waits for its slot."""
    from django.db import connection, transaction

    from django_txmsg import send_message
    from django_txmsg.models import InboxMessage, RateLine

    def put() -> None:
        with transaction.atomic():
            send_message(stage.destination, 1, headers={"tenant": "large"})

    put()
    wait(RateLine.objects.filter(stage=stage.name).exists)
    inbox, line = InboxMessage._meta.db_table, RateLine._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {line} SET taken = taken + %s WHERE stage = %s", [many, stage.name]
        )
        put()  # the last one, of which the others are copies
        wait(InboxMessage.objects.filter(slot__gt=0, due_at__isnull=False).exists)
        own = {
            "message_id": "gen_random_uuid()",
            "slot": "w.slot - n",
            "due_at": "to_timestamp(l.origin + (w.slot - n) * l.period)",
        }
        names = [str(field.column) for field in InboxMessage._meta.concrete_fields]
        kept = [name for name in names if name != "id"]
        values = ", ".join(own.get(name, f"w.{name}") for name in kept)
        cursor.execute(
            f"INSERT INTO {inbox} ({', '.join(kept)}) SELECT {values}"
            f" FROM {inbox} w JOIN {line} l ON l.stage = w.stage AND l.key = w.key,"
            " generate_series(1, %s) n WHERE w.slot > 0",
            [many - 1],
        )


def embedded() -> None:
    """Set up Django with the embedded broker and persistent connections."""
    stand.django(
        f"{stand.postgresql()}?conn_max_age=600",
        {"SERVICE": "bench", "BROKERS": {"default": {"URL": URL}}},
    )


def send(stage: Any, count: int) -> None:
    """Store messages for a stage in one transaction."""
    from django.db import transaction

    from django_txmsg import send_messages

    with transaction.atomic():
        send_messages(
            {"destination": stage.destination, "body": n} for n in range(count)
        )


def wait(condition: Callable[[], bool]) -> None:
    """Wait until the condition is true. Check the condition rarely, because each check
    disturbs the measurement."""
    while not condition():
        time.sleep(0.02)


@contextmanager
def consuming(handler: Any, **options: Any) -> Iterator[Any]:
    """Run a stage with this handler while the block runs."""
    from django_txmsg import stages
    from django_txmsg.consuming.consumer import Consumer

    from .consume import clean

    clean()
    destination = f"bench.limits.{uuid.uuid4().hex[:8]}"
    stages.stage(destination, **options)(handler)
    (declared,) = stages.find([destination])
    consumer = Consumer([declared])
    thread = threading.Thread(target=consumer.run)
    thread.start()
    wait(lambda: all(one.dry for one in consumer.threads))  # all are connected
    try:
        yield declared
    finally:
        consumer.stop()
        thread.join()
        stages.unregister(destination)


@contextmanager
def answering() -> Iterator[tuple[str, list[float]]]:
    """Run an HTTP server in a thread. The server answers each request after one second.
    Yields the server's address, and a list to which the server appends the time when a
    request arrives."""
    asked: list[float] = []

    async def answer(reader: Any, writer: Any) -> None:
        with suppress(asyncio.CancelledError):  # the end of the benchmark
            while await reader.readline():
                while (await reader.readline()).strip():
                    pass
                asked.append(time.monotonic())
                await asyncio.sleep(1.0)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
        writer.close()

    async def end() -> None:
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    loop = asyncio.new_event_loop()
    starting = asyncio.start_server(answer, "127.0.0.1", 0, backlog=2 * CALLS)
    server = loop.run_until_complete(starting)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", asked
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "processes": processes,
    "rate": rate,
    "window": window,
    "calls": calls,
    "tenants": tenants,
}


if __name__ == "__main__":
    main()
