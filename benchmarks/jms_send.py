"""How fast `django_txmsg.jms` sends with receipts, compared with a bare socket and
stomp.py.

Prints a table of messages per second and of ratios. On another machine, only the ratios
are comparable. Every contender sends the same bytes per message. In each round, the
contenders use the same broker one after the other. The queue is emptied after each of
them.

    python -m benchmarks.jms_send                    # starts ActiveMQ and RabbitMQ
    TXMSG_BENCH_RABBITMQ=stomp://guest:guest@host:61613 \\
    TXMSG_BENCH_ACTIVEMQ=stomp://host:61613 python -m benchmarks.jms_send --rounds 5
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import statistics
import threading
import time
import tracemalloc
import uuid
from collections.abc import Callable, Iterator

from django_txmsg import jms

from . import stand

BODY = b"x" * 300
QUEUE = "bench.jms_send"
Contender = Callable[[str, int], None]


# -- the contenders ------------------------------------------------------------------


def _frame(extra: str) -> bytes:
    """Compose the same bytes that django_txmsg.jms writes for a message."""
    return (
        f"SEND\ndestination:/queue/{QUEUE}\npersistent:true\ncontent-length:300\n"
        f"content-type:application/octet-stream\ntxmsg-id:{uuid.uuid4()}\n{extra}\n"
    ).encode() + BODY + b"\x00"  # fmt: skip


def _raw_connection(url: str) -> socket.socket:
    factory = jms.ConnectionFactory(url)
    connection = socket.create_connection(factory.addresses[0])
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    user, password = factory.options.user, factory.options.password
    login = f"login:{user}\npasscode:{password}\n" if user else ""
    connection.sendall(f"CONNECT\naccept-version:1.2\nhost:/\n{login}\n\0".encode())
    answer = connection.recv(4096)
    if not answer.startswith(b"CONNECTED"):
        raise SystemExit(f"The broker refused the connection: {answer!r}")
    return connection


def raw_pipelined(url: str, count: int, window: int = 1000) -> None:
    """Send over a bare socket. Many frames are written together. Up to `window`
    messages may wait for their receipts."""
    with contextlib.closing(_raw_connection(url)) as connection:
        sent = received = 0
        while received < count:
            room = min(window - (sent - received), count - sent)
            if room:
                frames = [
                    _frame(f"receipt:{sent + n}\n") for n in range(min(room, 100))
                ]
                connection.sendall(b"".join(frames))
                sent += len(frames)
                if sent - received < window and sent < count:
                    continue
            received += connection.recv(1 << 16).count(b"\x00")


def raw_transactions(url: str, count: int, per_commit: int = 500) -> None:
    """Send over a bare socket, in transactions of `per_commit` messages. Only the
    COMMIT has a receipt."""
    with contextlib.closing(_raw_connection(url)) as connection:
        for number in range(count // per_commit):
            name = f"transaction:t{number}\n"
            frames = [f"BEGIN\n{name}\n\0".encode()]
            frames += [_frame(name) for _ in range(per_commit)]
            frames.append(f"COMMIT\n{name}receipt:c{number}\n\n\0".encode())
            connection.sendall(b"".join(frames))
            while b"\x00" not in connection.recv(1 << 16):
                pass


def stomp_one_by_one(url: str, count: int) -> None:
    """Send with stomp.py like most users: wait for the receipt of each message before
    sending the next."""
    import stomp

    options = jms.ConnectionFactory(url)
    arrived = threading.Event()

    class Receipts(stomp.ConnectionListener):
        def on_receipt(self, _frame: object) -> None:
            arrived.set()

    client = stomp.Connection12(options.addresses, vhost="/", auto_decode=False)
    client.set_listener("receipts", Receipts())
    client.connect(options.options.user, options.options.password, wait=True)
    for number in range(count):
        arrived.clear()
        client.send(
            f"/queue/{QUEUE}", BODY, "application/octet-stream",
            persistent="true", receipt=str(number), **{"txmsg-id": str(uuid.uuid4())},
        )  # fmt: skip
        if not arrived.wait(30):
            raise SystemExit("stomp.py got no receipt")
    client.disconnect()


class _Counter:
    """A completion listener that counts the outcomes."""

    def __init__(self) -> None:
        self.completed = self.failed = 0

    def on_completion(self, _message: jms.Message) -> None:
        self.completed += 1

    def on_exception(self, _message: jms.Message, _error: jms.MessagingError) -> None:
        self.failed += 1


def send_async(url: str, count: int, window: int = 1000) -> None:
    """Send with `send_async` and a completion listener, with up to `window` messages in
    flight."""
    counter = _Counter()
    with jms.ConnectionFactory(url, max_in_flight=window).create_connection() as link:
        session = link.create_session()
        with session.create_producer(QUEUE) as producer:
            for _ in range(count):
                producer.send_async(jms.Message(BODY), counter)
    if (counter.completed, counter.failed) != (count, 0):
        raise SystemExit(f"{counter.completed} of {count} completed")


def send_batch(url: str, count: int, per_batch: int = 500) -> None:
    """Send with `send_batch` like the relay, in batches of `per_batch` messages."""
    with jms.ConnectionFactory(url).create_connection() as link:
        session = link.create_session()
        for _ in range(count // per_batch):
            batch = [(QUEUE, jms.Message(BODY)) for _ in range(per_batch)]
            outcomes = session.send_batch(batch)
            if any(outcomes):
                raise SystemExit(f"a message was not stored: {outcomes}")


def transacted(url: str, count: int, per_commit: int = 500) -> None:
    """Send in a transacted session, with `per_commit` messages in each transaction."""
    with jms.ConnectionFactory(url).create_connection() as link:
        session = link.create_session(transacted=True)
        producer = session.create_producer(QUEUE)
        for _ in range(count // per_commit):
            for _ in range(per_commit):
                producer.send(jms.Message(BODY))
            session.commit()


# -- running them --------------------------------------------------------------------


def drain(url: str, count: int) -> None:
    """Receive all messages from the queue, and check that none is missing."""
    with contextlib.closing(_raw_connection(url)) as connection:
        connection.settimeout(30)
        connection.sendall(
            f"SUBSCRIBE\nid:1\nack:auto\ndestination:/queue/{QUEUE}\n\n\0".encode()
        )
        taken = 0
        while taken < count:
            taken += connection.recv(1 << 16).count(b"\x00")


def compare(
    url: str, contenders: dict[str, tuple[Contender, int]], rounds: int
) -> dict[str, tuple[float, float]]:
    """Return, for each contender, the median rate and the median CPU microseconds per
    message."""
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, (run, count) in contenders.items():
            began, cpu = time.perf_counter(), time.process_time()
            run(url, count)
            took, cpu = time.perf_counter() - began, time.process_time() - cpu
            rates[name].append((count / took, cpu / count * 1e6))
            drain(url, count)
    return {
        name: (
            statistics.median(rate for rate, _ in measured[1:]),  # the first warms up
            statistics.median(cpu for _, cpu in measured[1:]),
        )
        for name, measured in rates.items()
    }


def memory_per_message(count: int = 20_000) -> float:
    """Return the bytes of memory that a message in flight takes, including its 300-byte
    body."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=_swallow, args=(server,), daemon=True).start()
        factory = jms.ConnectionFactory(
            f"stomp://127.0.0.1:{port}", heartbeat=0, max_in_flight=count + 1
        )
        link = factory.create_connection()
        producer = link.create_session().create_producer(QUEUE)
        counter = _Counter()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(count):
            producer.send_async(jms.Message(BODY), counter)
        held = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        link.link.lose("the benchmark is over")
        link.close()
    return held / count


def _swallow(server: socket.socket) -> None:
    connection, _ = server.accept()
    connection.recv(4096)
    connection.sendall(b"CONNECTED\nversion:1.2\nserver:sink/1\n\n\0")
    while connection.recv(1 << 16):
        pass


@contextlib.contextmanager
def brokers() -> Iterator[tuple[str | None, str | None]]:
    """Yield the URLs of ActiveMQ and RabbitMQ. If the environment has neither URL,
    start both servers."""
    names = ("TXMSG_BENCH_ACTIVEMQ", "TXMSG_BENCH_RABBITMQ")
    activemq, rabbitmq = (os.environ.get(name) for name in names)
    with contextlib.ExitStack() as stack:
        if not (activemq or rabbitmq):
            from tests import services

            servers = services.ActiveMQ(), services.RabbitMQ()
            for server in servers:
                stack.callback(server.stop)
                server.start()
            activemq, rabbitmq = (server.url() for server in servers)
        yield activemq, rabbitmq


def report(title: str, results: dict[str, tuple[float, float]]) -> None:
    """Print the results of one broker."""
    print(f"\n{title:<44}{'msg/s':>10}{'CPU us/msg':>12}")
    for name, (rate, cpu) in results.items():
        print(f"{name:<44}{rate:>10,.0f}{cpu:>12.0f}")


def ratio(text: str, value: float, goal: float) -> None:
    """Print a ratio and its goal."""
    met = value >= goal
    print(f"  {text:<58}{value:>7.2f}   goal {goal:g}  {'met' if met else 'MISSED'}")
    ours, _, other = text.partition(" / ")
    stand.note(f"jms client: {ours}", other, [value], f"≥ {goal:g}")


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=20_000)
    options = parser.parse_args()
    logging.getLogger("django_txmsg").setLevel(logging.ERROR)
    count = options.messages
    with brokers() as (activemq, rabbitmq):
        if rabbitmq:
            contenders: dict[str, tuple[Contender, int]] = {
                "bare socket, window 1000": (raw_pipelined, count),
                "jms send_async, window 1000": (send_async, count),
                "jms send_batch of 500": (send_batch, count),
                "stomp.py, one receipt per message": (stomp_one_by_one, count // 10),
            }
            found = compare(rabbitmq, contenders, options.rounds)
            report("RabbitMQ, 300 B persistent", found)
            raw, ours, batch, stomp = (rate for rate, _ in found.values())
            ratio("send_async / bare socket", ours / raw, 0.6)
            ratio("send_async / stomp.py one receipt each", ours / stomp, 5)
            ratio("send_batch / bare socket", batch / raw, 0.6)
        if activemq:
            contenders = {
                "bare socket, 500 per COMMIT": (raw_transactions, count),
                "jms transacted session, 500 per commit": (transacted, count),
                "jms send_batch of 500": (send_batch, count),
                "stomp.py, one receipt per message": (stomp_one_by_one, count // 10),
            }
            found = compare(activemq, contenders, options.rounds)
            report("ActiveMQ, 300 B persistent", found)
            raw, ours, batch, stomp = (rate for rate, _ in found.values())
            ratio("transacted session / bare socket", ours / raw, 0.7)
            ratio("send_batch / bare socket", batch / raw, 0.7)
            ratio("send_batch / stomp.py one receipt each", batch / stomp, 5)
    print(f"\nMemory per message in flight, 300 B body: {memory_per_message():,.0f} B")


if __name__ == "__main__":
    main()
