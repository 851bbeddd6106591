"""For each message that the client accepts, it calls exactly one callback, in any order
of events.

Hypothesis chooses the order of sends, receipts, errors, time-outs, lost connections and
closes. The scripted broker and the real client execute it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_txmsg import jms
from django_txmsg.jms.ledger import Ledger, Pending, State
from django_txmsg.testing import ScriptedBroker

from .conftest import DESTINATION, Listener

STEPS = st.sampled_from(
    ["send", "send", "send", "sync", "short", "submit", "release", "shuffle", "cut",
     "stall", "resume", "garbage", "spoil"]
)  # fmt: skip
FATES = st.sampled_from(["ok", "hold", "hold", "drop", "twice", "reject", "cut"])


@settings(max_examples=60, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    profile=st.sampled_from(["classic", "rabbitmq"]),
    window=st.sampled_from([1, 3, 256]),
    fates=st.lists(FATES, min_size=1, max_size=12),
    steps=st.lists(STEPS, min_size=1, max_size=25),
    end=st.sampled_from(["producer", "session", "connection", "lose"]),
)
def test_exactly_one_callback_per_accepted_send_in_order(
    profile: str, window: int, fates: list[str], steps: list[str], end: str
) -> None:
    with ScriptedBroker(profile) as broker:
        for number, fate in enumerate(fates, start=1):
            rule = broker.on("SEND", nth=number)
            {
                "ok": lambda: None,
                "hold": rule.hold_receipt,
                "drop": rule.drop_receipt,
                "twice": rule.duplicate_receipt,
                "reject": lambda rule=rule: rule.reject("no", closes=False),
                "cut": rule.cut,
            }[fate]()
        connection = jms.ConnectionFactory(
            broker.url, max_in_flight=window, send_timeout=0.3, close_timeout=0.5,
            give_up_after_timeouts=0,
        ).create_connection()  # fmt: skip
        session = connection.create_session()
        producer, listener = session.create_producer(DESTINATION), Listener()
        accepted: list[int] = []
        futures: list[jms.CompletionFuture] = []

        for number, step in zip(itertools.count(), steps, strict=False):
            play(step, number, broker, producer, listener, accepted, futures)
        broker.resume()
        closing = threading.Thread(
            target={
                "producer": producer.close,
                "session": session.close,
                "connection": connection.close,
                "lose": lambda: connection.link.lose("lost"),
            }[end]
        )
        closing.start()
        closing.join(30)
        assert not closing.is_alive(), "close hangs"
        listener.wait_for(len(accepted))
        for future in futures:
            future.exception(30)
        connection.close()

    assert listener.bodies == accepted
    assert session.sends.in_flight == session.sends.uncompleted == 0
    assert session.sends._in_flight_bytes == session.sends._uncompleted_bytes == 0
    assert connection.link.ledger.open == {}


def play(
    step: str,
    number: int,
    broker: ScriptedBroker,
    producer: jms.MessageProducer,
    listener: Listener,
    accepted: list[int],
    futures: list[jms.CompletionFuture],
) -> None:
    message = jms.Message(number)
    try:
        if step in ("send", "short"):
            timeout = 0.05 if step == "short" else None
            producer.send_async(message, listener, timeout=timeout)
            accepted.append(number)
        elif step == "sync":
            producer.send(message, timeout=0.1)
        elif step == "submit":
            futures.append(producer.submit(message, timeout=0.1))
        elif step == "release":
            broker.release()
        elif step == "shuffle":
            with broker.changed:
                broker.release(order=list(reversed(range(len(broker.script.held)))))
        elif step == "garbage":
            broker.write(b"RECEIPT\nreceipt-id:1-99999\n\n\x00\n\n")
        elif step == "spoil":
            broker.write(b"ERROR\nmessage:for nobody\nreceipt-id:0-1\n\n\x00")
        else:
            {"cut": broker.cut, "stall": broker.stall, "resume": broker.resume}[step]()
    except jms.MessagingError:
        pass  # refused in the call: then no callback may come


class Counted(Pending):
    """A pending frame that counts how often it is settled."""

    __slots__ = ("told",)

    def __init__(self, number: int, timeout: float) -> None:
        super().__init__(f"entry {number}", timeout)
        self.told = 0

    def on_settled(self) -> None:
        self.told += 1


@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["open", "loose", "receipt", "error", "bare", "expire",
                             "lose"]),
            st.integers(0, 7),
            st.booleans(),
        ),
        max_size=60,
    )
)  # fmt: skip
def test_an_entry_is_settled_at_most_once_by_any_events_and_never_lost(
    events: list[tuple[str, int, bool]],
) -> None:
    ledger = Ledger(1, lambda: "the broker")
    entries: list[Counted] = []

    for now, (event, which, flag) in enumerate(events):
        receipt = entries[which % len(entries)].receipt if entries else b"1-0"
        if event == "open":
            entry = Counted(len(entries), which)
            entry.receipt = ledger.new_receipt()
            ledger.reserve(entry, now)
            entries.append(entry)
        elif event == "loose":
            ledger.note_loose(None)
        elif event == "receipt":
            ledger.receipt(receipt)
        elif event == "error":
            ledger.error(receipt.decode(), "no", names_receipts=flag)
        elif event == "bare":
            ledger.error("", "no", names_receipts=flag)
        elif event == "expire":
            ledger.expire(now)
        else:
            ledger.lose("lost", "")

    for entry in entries:
        is_open = entry.receipt in ledger.open
        assert entry.told == (0 if is_open else 1)
        assert (entry.state >= State.ACKED) is not is_open
    ledger.lose("the end", "")
    assert all(entry.told == 1 for entry in entries)


def test_a_receipt_settles_only_its_own_send() -> None:
    ledger = Ledger(1, lambda: "the broker")
    entries = [Counted(n, 100) for n in range(3)]
    for entry in entries:
        entry.receipt = ledger.new_receipt()
        ledger.reserve(entry, 0)

    ledger.receipt(entries[2].receipt)

    assert [entry.state for entry in entries] == [
        State.QUEUED, State.QUEUED, State.ACKED,
    ]  # fmt: skip


def test_the_watchdog_would_show_every_stack(capfd: pytest.CaptureFixture[str]) -> None:
    import faulthandler
    import sys

    faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)

    assert "test_properties.py" in capfd.readouterr().err


TRANSACTED = st.sampled_from(
    ["send", "send", "async", "async", "chain", "chain", "commit", "rollback",
     "release", "cut", "close_producer", "other_thread"]
)  # fmt: skip
TRANSACTED_FATES = st.sampled_from(["ok", "ok", "ok", "hold", "reject", "drop"])


class Chain(Listener):
    """A listener whose callback sends one more message, but only once."""

    def __init__(self, send: Callable[[Listener], None]) -> None:
        super().__init__()
        self._send = send

    def _tell(self, message: jms.Message, error: jms.MessagingError | None) -> None:
        super()._tell(message, error)
        if not str(message.body).endswith("+"):
            self._send(self)


@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    profile=st.sampled_from(["classic", "rabbitmq"]),
    window=st.sampled_from([1, 256]),
    fates=st.lists(TRANSACTED_FATES, min_size=1, max_size=8),
    steps=st.lists(TRANSACTED, min_size=1, max_size=20),
)
def test_in_transactions_every_accepted_send_completes_once_and_nothing_hangs(
    profile: str, window: int, fates: list[str], steps: list[str]
) -> None:
    with ScriptedBroker(profile) as broker:
        for number, fate in enumerate(fates, start=1):
            rule = broker.on("SEND", nth=number)
            {
                "ok": lambda: None,
                "hold": rule.hold_receipt,
                "drop": rule.drop_receipt,
                "reject": lambda rule=rule: rule.reject("no", closes=False),
            }[fate]()
        connection = jms.ConnectionFactory(
            broker.url, max_in_flight=window, send_timeout=0.2, close_timeout=0.5,
            give_up_after_timeouts=0,
        ).create_connection()  # fmt: skip
        session = connection.create_session(transacted=True)
        accepted: list[str] = []

        def send(body: str, listener: Listener) -> None:
            with contextlib.suppress(jms.MessagingError):
                producer = session.create_producer(DESTINATION)
                producer.send_async(jms.Message(body), listener)
                accepted.append(body)

        chain = Chain(lambda listener: send(f"{len(accepted)}+", listener))
        plays = {
            "send": lambda: session.create_producer(DESTINATION).send(jms.Message("s")),
            "async": lambda: send(f"{len(accepted)}a+", chain),
            "chain": lambda: send(f"{len(accepted)}c", chain),
            "commit": session.commit,
            "rollback": session.rollback,
            "release": broker.release,
            "cut": broker.cut,
            "close_producer": lambda: session.create_producer(DESTINATION).close(),
        }

        def run(parts: list[str]) -> None:
            for step in parts:
                if step == "other_thread":
                    threads.append(threading.Thread(target=run, args=(["commit"],)))
                    threads[-1].start()
                    continue
                with contextlib.suppress(jms.MessagingError):
                    plays[step]()

        threads: list[threading.Thread] = []
        run(steps)
        threads.append(threading.Thread(target=connection.close))
        threads[-1].start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "it hangs"

    assert sorted(chain.bodies) == sorted(accepted)
    assert session.sends.in_flight == session.sends.uncompleted == 0
    assert connection.link.ledger.open == {}
