"""The suite fails for a broker that breaks a promise. For each promise there is a
faulty broker, and the test that must find the fault."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import pytest

from django_txmsg.brokers import Broker, Delivery, Outgoing, Session
from django_txmsg.errors import (
    BrokerError,
    DestinationUnavailable,
    DispatchRejected,
    DispatchUnknown,
)
from django_txmsg.testing.broker_suite import BrokerSuite, talk
from tests.redis_broker import WORKERS, RedisBroker, RedisSession
from tests.services import Redis

Answers = list[BrokerError | None]


class Wrong(RedisSession):
    """A correct session. Each subclass breaks one promise."""

    transacted = False


class WrongBroker(RedisBroker):
    """A broker whose URL ends with `#` and the name of its session class. So a process
    can create the broker from alias and URL alone."""

    def open(
        self, *, transacted: bool = False, subscriber: str | None = None
    ) -> RedisSession:
        url, _, kind = self._url.partition("#")
        sound = RedisBroker(self.alias, url).open()
        session = globals()[kind](sound.client, sound._lease)
        session.transacted = transacted
        assert isinstance(session, RedisSession)
        return session


class SaysStoredAndIsNot(Wrong):
    def send(self, batch: Sequence[Outgoing], **options: Any) -> Answers:
        return [None for _ in batch]


class StoresWhenItEnds(Wrong):
    def send(self, batch: Sequence[Outgoing], **options: Any) -> Answers:
        self._enlisted += batch
        return [None for _ in batch]

    def close(self) -> None:
        if not self.transacted:
            self.commit([])
        super().close()


class Reorders(Wrong):
    def send(self, batch: Sequence[Outgoing], **options: Any) -> Answers:
        return super().send([*reversed(batch)])


class SendsTwice(Wrong):
    def send(self, batch: Sequence[Outgoing], **options: Any) -> Answers:
        super().send(batch[-1:])
        return super().send(batch)


class ForgetsOneOfMany(Wrong):
    def send(self, batch: Sequence[Outgoing], **options: Any) -> Answers:
        super().send(batch[:500])
        return [None for _ in batch]


class SendsEverythingToTheFirstDestination(Wrong):
    def send(self, batch: Sequence[Outgoing], **options: Any) -> Answers:
        return super().send(
            [replace(one, destination=batch[0].destination) for one in batch]
        )


class RefusesAndOvertakes(Wrong):
    def send(self, batch: Sequence[Outgoing], **options: Any) -> Answers:
        bad = ["\0" in "".join(one.headers.values()) for one in batch]
        super().send([one for one, b in zip(batch, bad, strict=True) if not b])
        return [DispatchRejected("a NUL") if one else None for one in bad]


class IgnoresIsolate(Wrong):
    def send(self, batch: Sequence[Outgoing], **options: Any) -> Answers:
        if not any(one.body == b"refused" for one in batch):
            return super().send(batch)
        return [DispatchUnknown("hung up", hung_up=True) for _ in batch]


class BlamesTheMessage(Wrong):
    def send(self, batch: Sequence[Outgoing], **options: Any) -> Answers:
        return [DispatchRejected("full") for _ in batch]


class TurnsAllAway(Wrong):
    def send(self, batch: Sequence[Outgoing], **options: Any) -> Answers:
        return [DestinationUnavailable("full") for _ in batch]


class AcknowledgesEarly(Wrong):
    def receive(self, timeout: float) -> Delivery | None:
        delivery = super().receive(timeout)
        if delivery is not None:
            super().ack([delivery])
        return delivery

    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Do nothing, because every message was acknowledged when it arrived."""


class LosesWhatItHolds(Wrong):
    def close(self) -> None:
        if self._held:
            self._transact([], [held(one) for one in self._held])
        super().close()


class AcknowledgesAllBefore(Wrong):
    def ack(self, deliveries: Sequence[Delivery]) -> None:
        last = max(one.handle for one in deliveries)
        super().ack([held(one) for one in self._held if one <= last])


class NeverAcknowledges(Wrong):
    def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Do nothing, so the broker delivers each message again and again."""


class DeliversTwice(Wrong):
    def _take(self, entries: list[Any], *, redelivered: bool) -> None:
        super()._take([*entries, *entries[-1:]], redelivered=redelivered)


class SaysNotOfRedelivery(Wrong):
    def _take(self, entries: list[Any], *, redelivered: bool) -> None:
        super()._take(entries, redelivered=False)


class SaysAlwaysRedelivered(Wrong):
    def _take(self, entries: list[Any], *, redelivered: bool) -> None:
        super()._take(entries, redelivered=True)


class NamesAnew(Wrong):
    def receive(self, timeout: float) -> Delivery | None:
        delivery = super().receive(timeout)
        if delivery is None:
            return None
        return replace(
            delivery, broker_message_id=f"{self._me}/{delivery.broker_message_id}"
        )


class TakesAll(Wrong):
    def subscribe(
        self, destination: str, *, prefetch: int, subscriber: str | None = None
    ) -> None:
        super().subscribe(destination, prefetch=1000, subscriber=subscriber)


class ComesBackAtOnce(Wrong):
    def receive(self, timeout: float) -> Delivery | None:
        return super().receive(0)


class TrimsHeaders(Wrong):
    def _transact(self, sends: Sequence[Outgoing], acks: Sequence[Delivery]) -> None:
        trimmed = [
            replace(one, headers={n: v.strip() for n, v in one.headers.items()})
            for one in sends
        ]
        super()._transact(trimmed, acks)


class CutsBodies(Wrong):
    def _transact(self, sends: Sequence[Outgoing], acks: Sequence[Delivery]) -> None:
        cut = [replace(one, body=one.body[: 1 << 20]) for one in sends]
        super()._transact(cut, acks)


class SendsBackAndKeeps(Wrong):
    def send_back(self, delivery: Delivery, headers: Mapping[str, str]) -> None:
        self.send([Outgoing(delivery.destination, headers, delivery.body)])


class SendsBeforeItCommits(Wrong):
    def enlist(self, outgoing: Outgoing) -> None:
        self.send([outgoing])


class CommitsWithoutTheAcknowledgement(Wrong):
    def commit(self, acks: Sequence[Delivery]) -> None:
        super().commit([])


class AcknowledgesWhatItRollsBack(Wrong):
    def rollback(self) -> None:
        super().rollback()
        self.ack([held(one) for one in self._held])


class CommitsAtTheEnd(Wrong):
    def close(self) -> None:
        if self.transacted:
            self.commit([])
        super().close()


class CountsAllAsOneSubscriber(Wrong):
    def subscribe(
        self, destination: str, *, prefetch: int, subscriber: str | None = None
    ) -> None:
        one = subscriber and "everybody"
        super().subscribe(destination, prefetch=prefetch, subscriber=one)


class ForgetsWhoIsAway(Wrong):
    def close(self) -> None:
        if self._group != WORKERS and self._group:
            self.client.xgroup_destroy(self._stream, self._group)
        super().close()


class WaitsForWhoNeverNamedItself(Wrong):
    def subscribe(
        self, destination: str, *, prefetch: int, subscriber: str | None = None
    ) -> None:
        name = subscriber or "nobody"
        super().subscribe(destination, prefetch=prefetch, subscriber=name)


class SharesNothing(Wrong):
    def subscribe(
        self, destination: str, *, prefetch: int, subscriber: str | None = None
    ) -> None:
        if destination.startswith("topic:"):
            subscriber = self._me
        super().subscribe(destination, prefetch=prefetch, subscriber=subscriber)


_sending = threading.Lock()


class LosesWhatTwoSendAtOnce(Wrong):
    """Loses messages when two sessions send at the same time: each session reads,
    changes and writes without a lock."""

    def send(self, batch: Sequence[Outgoing], **options: Any) -> Answers:
        if not _sending.acquire(blocking=False):
            return [None for _ in batch]
        try:
            return super().send(batch)
        finally:
            _sending.release()


class GivesToEverySession(Wrong):
    def subscribe(
        self, destination: str, *, prefetch: int, subscriber: str | None = None
    ) -> None:
        super().subscribe(destination, prefetch=prefetch, subscriber=subscriber)
        if not destination.startswith("topic:"):
            self._group = self._me
            self.client.xgroup_create(self._stream, self._group, "0", True)


class ForgetsASlowHolder(Wrong):
    """A session that renews its lease only when a method is called. While a handler
    runs, no method is called, so the lease ends."""

    def _keep(self) -> None:
        """Do not renew the lease."""


class SendsMoreThanItsPrefetch(Wrong):
    def _fetch(self, wait: float) -> None:
        self._prefetch = len(self._held) + 1
        super()._fetch(wait)


class Suite(BrokerSuite):
    """The broker suite for one class of sessions. The tests of this file call the
    suite's tests one by one."""

    holds_back = False
    held_for = 2.0

    def __init__(self, url: str, kind: type[Session], stack: ExitStack) -> None:
        self.url, self.stack = f"{url}#{kind.__name__}", stack

    def broker(self) -> Broker:
        return WrongBroker("tested", self.url)

    def turned_away(self, destination: str) -> AbstractContextManager[object]:
        return nullcontext()

    def refused(self, destination: str) -> Outgoing | None:
        return Outgoing(destination, {}, b"refused")


def held(entry: bytes) -> Delivery:
    """Return a delivery that a session can acknowledge. Its handle is `entry`."""
    return Delivery("", {}, b"", False, "", entry)


STORED = "a_batch_is_stored_in_order_and_every_outcome_is_a_receipt"
AGAIN = "what_is_not_acknowledged_comes_again_when_its_session_ends"
OVER = "what_is_acknowledged_never_comes_again"
TURNED_AWAY = "a_destination_that_takes_nothing_says_so_and_others_go_on"
HEADERS = "any_text_is_a_header"
TOGETHER = "a_transaction_sends_and_acknowledges_together"
EACH = "every_subscriber_of_a_topic_gets_a_copy_also_while_it_is_away"
BIG = b"\xff" * 2_000_000


@pytest.mark.parametrize(
    ("kind", "test", "arguments"),
    [
        (SaysStoredAndIsNot, STORED, [1]),
        (StoresWhenItEnds, "what_is_proven_is_there_while_its_sender_goes_on", []),
        (Reorders, STORED, [3]),
        (SendsTwice, STORED, [3]),
        (ForgetsOneOfMany, STORED, [600]),
        (
            SendsEverythingToTheFirstDestination,
            "a_batch_may_go_to_many_destinations",
            [],
        ),
        (RefusesAndOvertakes, "followers_of_a_refused_message_are_held_back", []),
        (
            IgnoresIsolate,
            "isolated_messages_show_on_which_one_a_broker_hangs_up",
            [],
        ),
        (BlamesTheMessage, TURNED_AWAY, []),
        (TurnsAllAway, TURNED_AWAY, []),
        (AcknowledgesEarly, AGAIN, []),
        (AcknowledgesEarly, "deliveries_of_a_killed_consumer_are_redelivered", []),
        (LosesWhatItHolds, AGAIN, []),
        (AcknowledgesAllBefore, AGAIN, []),
        (NeverAcknowledges, OVER, []),
        (DeliversTwice, OVER, []),
        (SaysNotOfRedelivery, AGAIN, []),
        (SaysAlwaysRedelivered, OVER, []),
        (NamesAnew, AGAIN, []),
        (TakesAll, "prefetch_bounds_what_a_consumer_keeps_from_others", []),
        (ComesBackAtOnce, "nothing_comes_from_an_empty_destination", []),
        (TrimsHeaders, HEADERS, []),
        (CutsBodies, "any_bytes_are_a_body", [BIG]),
        (SendsBackAndKeeps, "a_message_sent_back_comes_again_as_it_was_changed", []),
        (SendsBeforeItCommits, "a_transaction_its_session_did_not_commit_never_"
         "happened", []),
        (SendsBeforeItCommits, "a_transaction_rolled_back_sends_nothing_and_its_"
         "message_stays_in_hand", []),
        (CommitsWithoutTheAcknowledgement, TOGETHER, []),
        (AcknowledgesWhatItRollsBack, "a_rolled_back_delivery_is_redelivered_to_"
         "another_session", []),
        (CommitsAtTheEnd, "a_transaction_its_session_did_not_commit_never_happened",
         []),
        (CountsAllAsOneSubscriber, EACH, []),
        (ForgetsWhoIsAway, EACH, []),
        (WaitsForWhoNeverNamedItself, "a_topic_keeps_nothing_for_unnamed_"
         "subscriptions", []),
        (LosesWhatTwoSendAtOnce, "what_sessions_send_at_once_is_all_there_once_and_"
         "in_order", []),
        (GivesToEverySession, "what_sessions_receive_at_once_comes_to_one_of_them",
         []),
        (ForgetsASlowHolder, "what_a_slow_session_holds_comes_to_nobody_else", []),
        (SendsMoreThanItsPrefetch, "a_session_that_holds_its_prefetch_waits_for_an_"
         "acknowledgement", []),
        (SharesNothing, "sessions_of_one_subscriber_share_its_messages", []),
    ],
)  # fmt: skip
def test_a_broken_promise_is_found(
    redis: Redis,
    destination: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Session],
    test: str,
    arguments: list[Any],
) -> None:
    monkeypatch.setattr(talk, "SOON", 0.5)
    with ExitStack() as stack:
        suite = Suite(f"{redis.url(2)}?lease=0.1", kind, stack)
        with pytest.raises(AssertionError):
            getattr(suite, f"test_{test}")(destination, *arguments)


class SaysItIsInTheDatabase(RedisBroker):
    stored_in = "default"


class OnlySends(RedisBroker):
    consumable = False


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("kind", "test", "given"),
    [
        (
            SaysItIsInTheDatabase,
            "what_is_stored_in_a_database_belongs_to_its_transaction",
            ["q"],
        ),
        (OnlySends, "its_capabilities_are_of_their_types", []),
    ],
)
def test_a_false_capability_is_found(
    redis: Redis, kind: type[Broker], test: str, given: list[str]
) -> None:
    class Said(Suite):
        def broker(self) -> Broker:
            return kind("tested", redis.url(2))

    with ExitStack() as stack:
        suite = Said(redis.url(2), Wrong, stack)
        with pytest.raises(AssertionError):
            getattr(suite, f"test_{test}")(*given)
