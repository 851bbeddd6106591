"""Hop 7 in order: a message of an ordered stage waits until its predecessor has ended.

The sender's relay has put a link to the predecessor into each message. The statement
that takes a message checks whether the message's turn has come. If not, the consumer
parks the message. The transaction that ends the predecessor releases the parked
message. See docs/decisions/order-by-links.md.
"""

from __future__ import annotations

import datetime as dt
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from .. import conf, wire
from ..models import InboxMessage, StageState
from ..models.fields import clock
from ..models.inbox_order import ASKED, ON_ITS_WAY
from ..models.turn import Turn
from ..stages import Stage
from .arrival import Arrival, Duplicate, Outcome, Waiting

_FIRST = dt.datetime.min.replace(tzinfo=dt.timezone.utc)


#: Seconds for which a message is held while another thread of this process processes
#: its predecessor: that is less work than parking it.
PATIENCE = 0.1


#: The messages that threads of this process are processing at ordered stages, by stage
#: and id. `_changed` is held while one is added or removed.
_in_hand: set[tuple[str, uuid.UUID | None]] = set()
_changed = threading.Condition()


@contextmanager
def in_hand(arrival: Arrival) -> Iterator[None]:
    """Register a message as being processed while the block runs. If another thread of
    this process is processing the message's predecessor, first wait a moment for that
    thread."""
    turn = arrival.turn
    if turn is None:
        yield
        return
    own, before = (turn.stage, arrival.message_id), (turn.stage, turn.after_id)
    try:
        with _changed:
            _in_hand.add(own)
            if before != own:
                _changed.wait_for(lambda: before not in _in_hand, PATIENCE)
        yield
    finally:
        with _changed:
            _in_hand.discard(own)
            _changed.notify_all()


def out_of_turn(arrival: Arrival, *, attempts: int = 1) -> Outcome | None:
    """Return None if the message may be processed now: its turn has come, or the stage
    is not ordered. Otherwise park the message, subtract `attempts` from the message's
    number of attempts, and return the outcome."""
    turn = arrival.turn
    if turn is None or arrival.order.has_come(turn):
        return None
    return _park(arrival, turn, attempts)


def lost(arrival: Arrival) -> Outcome:
    """Return the outcome of a message whose row could not be taken. Either another
    worker has settled the message, or the message is now parked, because its turn has
    not come or another transaction has locked its key."""
    turn = arrival.turn
    if turn is None or arrival.record is None:
        return Duplicate()
    return out_of_turn(arrival) or _park(arrival, turn, 1, aside=True)


def put_aside(arrival: Arrival) -> None:
    """Record the key of a failed message, so that the admin can show which messages the
    failed message blocks. Call this in the transaction that parks or buries the
    message, or before the message is redelivered in another way."""
    if arrival.turn is not None:
        arrival.order.aside(arrival.recorded.id, arrival.turn)


def kept_headers(arrival: Arrival) -> dict[str, str]:
    """Return the headers to store with a failed message. At an ordered stage they omit
    the link to the message's predecessor. The link is no longer needed, because the
    message's turn has come, and the predecessor's row may be pruned before the next
    attempt."""
    kept = arrival.kept_headers
    if arrival.turn is None:
        return kept
    return {name: value for name, value in kept.items() if name != wire.AFTER}


def _park(
    arrival: Arrival, turn: Turn, attempts: int, *, aside: bool = False
) -> Outcome:
    at_once = arrival.order.wait(
        arrival.recorded.id,
        turn,
        headers=arrival.kept_headers,
        body=arrival.delivery.body,
        token=arrival.token,
        uncounted=attempts,
        aside=aside,
    )
    if at_once is None:
        return Duplicate()
    if at_once:
        arrival.woken.set()
    return Waiting()


def wake(arrivals: Sequence[Arrival]) -> None:
    """Make the followers of these messages due. Call this last in the transaction that
    ends the messages. If this transaction sees a snapshot, call it first.

    A stage that is not ordered has no followers of its own. But while a change of
    `ordered=` is deployed, it may get a message that a process with the other code has
    parked, and behind which that process has parked more messages.
    """
    keyed = [arrival for arrival in arrivals if arrival.turn or _was_keyed(arrival)]
    if not keyed:
        return
    first = keyed[0]
    if first.order.wake(first.stage.name, [one.message_id for one in keyed]):
        # Before the commit: this thread reads it after the commit.
        first.woken.set()


def _was_keyed(arrival: Arrival) -> bool:
    """Return whether the message was parked with the key of an ordered stage. A message
    with a slot has the key of its line instead."""
    parked = arrival.parked
    return parked is not None and parked.slot is None and parked.key != ""


def in_order(arrivals: Sequence[Arrival]) -> list[int]:
    """Return the indexes of the arrivals, sorted so that the messages of each key are
    in order."""

    def place(number: int) -> dt.datetime:
        turn = arrivals[number].turn
        return turn.after_at or _FIRST if turn is not None else _FIRST

    return sorted(range(len(arrivals)), key=place)


class Admission:
    """Decides which messages of a batch may be processed in the batch's open
    transaction."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._done: set[object] = set()
        self._keys: set[str] = set()
        turns = [one.turn for one in arrivals if one.turn is not None]
        if not turns:
            return
        rows = arrivals[0].order
        # First lock the keys: what other transactions do with them is then committed,
        # or has yet to begin.
        self._keys = rows.lock_keys(turns)
        before = {turn.after_id for turn in turns if turn.after_id is not None}
        self._done |= rows.let_go_by(before, turns[0])

    def admits(self, arrival: Arrival) -> bool:
        """Return whether the message may be processed now: its predecessor has ended,
        and this transaction has locked its key. A message without order is always
        admitted."""
        turn = arrival.turn
        if turn is None:
            return True
        come = turn.after_id is None or turn.after_id in self._done
        return come and turn.key in self._keys

    def note(self, message_id: object) -> None:
        """Record that a message of the batch is processed, so that its follower may be
        processed next."""
        self._done.add(message_id)


def grace() -> float:
    """Return the number of seconds after which a subscribed stage is assumed to have
    received everything that was in its queue. Before that, a missing predecessor does
    not count as lost: after a stop of the stage, it may still be in the queue."""
    return min(conf.get().ORDER_PATIENCE, ON_ITS_WAY)


def ask(
    stage: Stage,
    received: bool = True,
    between: Callable[[], object] = lambda: None,
) -> None:
    """Check a stage's due waiting messages, and postpone those whose turn has not come.
    If the stage has `received` everything in its queue, also release messages that have
    waited long enough for a missing predecessor. `between` is called between the
    statements. If it returns True, the remaining messages are not checked."""
    using = stage.definition.using
    rows = InboxMessage.order.db_manager(using)
    keep, skips = conf.get().RETENTION.INBOX, stage.ordered == "skip"
    if received:
        rows.expire_waits(
            stage.name,
            skips=skips,
            patience=conf.get().ORDER_PATIENCE,
            retention=None if keep is None else dt.timedelta(days=keep),
            link=wire.AFTER,
        )
    # Read once: the first messages may be due again before the last one is checked.
    until = clock(using)
    while rows.ask(stage.name, until, skips=skips, soon=not received) == ASKED:
        if between():
            return


def notice(stage: Stage, between: Callable[[], object]) -> None:
    """Release the messages of an ordered stage that nothing else would release, if a
    process in which the stage is not ordered has run since. `between` is called between
    the statements."""
    using = stage.definition.using
    if StageState.objects.db_manager(using).ordered(stage.name):
        rows = InboxMessage.order.db_manager(using)
        rows.release_stranded(stage.name, between)


def begin(
    stages: Collection[Stage], between: Callable[[], object] = lambda: None
) -> None:
    """Record which of these stages are ordered, and since when. If a stage is ordered,
    release messages that nothing else would release. If a stage is not ordered, release
    all its waiting messages. If a stage is not ordered, or if the settings do not limit
    its waiting messages, also record that the stage is not full. `between` is called
    between the statements."""
    limited = conf.get().ORDER_MAX_WAITING or conf.get().ORDER_MAX_BYTES
    for stage in stages:
        using = stage.definition.using
        states = StageState.objects.db_manager(using)
        rows = InboxMessage.order.db_manager(using)
        if stage.ordered:
            states.ordered(stage.name)
            rows.release_stranded(stage.name, between)
        else:
            states.unordered(stage.name)
            rows.wait_no_more(stage.name, between)
        if not (stage.ordered and limited):
            states.full(stage.name, False)


def end(stage: Stage) -> None:
    """Record once more that a stage is not ordered, when its process ends. The messages
    that it has processed have released no followers, so an ordered process releases
    these now."""
    if not stage.ordered:
        StageState.objects.db_manager(stage.definition.using).unordered(stage.name)
