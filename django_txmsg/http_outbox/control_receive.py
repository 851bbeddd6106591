"""The receiver of control messages: checks the session that sent a message.

If the session committed and its process died, the receiver dispatches the session's
messages. If the session never committed, there is nothing to dispatch. In both cases
the control message is then settled. While the outcome is unknown, or another process is
sending the messages, the receiver checks the session again later.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Count, Q
from django.db.models.functions import Now
from django.utils import timezone

from .. import conf, rules, signals
from ..brokers.base import Delivery
from ..envelope.failure import stored_text
from ..errors import BrokerError
from ..models import OutboxMessage, SessionRecord
from ..models.fields import Holds
from ..models.http_outbox import SessionStatus
from ..models.outbox import PENDING
from ..runtime import database_health
from . import control_group, database_identity
from .control_message import ControlMessage
from .database_identity import Verdict

#: Seconds, beyond the longest lease, after which committed messages that cannot be sent
#: are left to the relay.
PATIENCE = 60.0
#: Number of messages whose checks are remembered. A forgotten one starts again.
REMEMBERED = 10_000


@dataclass
class Look:
    """The checks of one session: when they began, and how many there have been."""

    began: float = field(default_factory=time.monotonic)
    attempts: int = 0
    transit_time: float | None = None
    #: Whether the session has committed, so that only the dispatch of its messages is
    #: outstanding.
    committed: bool = False
    #: Since when the dispatch fails.
    stuck_since: float | None = None

    def pause(self, first: float, most: float) -> float:
        """Return the seconds until the next check. The pause doubles with each check,
        from `first` to `most`."""
        return min(most, first * 2.0 ** min(self.attempts - 1, 30))

    def patient(self) -> bool:
        """Return whether to wait once more for another process that has claimed the
        messages. The waits together are long enough for that process's lease to end if
        the process is dead."""
        if self.stuck_since is None:
            self.stuck_since = time.monotonic()
        return time.monotonic() - self.stuck_since < conf.get().RELAY.LEASE + PATIENCE


#: The checks of each control message, by its id and whether it is signed: an unsigned
#: message with the id of a signed one must not end its checks.
_looks: OrderedDict[tuple[str, bool], Look] = OrderedDict()
_lock = threading.Lock()


def remember(control: ControlMessage) -> Look:
    """Count one more check of the session that a control message names, and return the
    state of these checks."""
    with _lock:
        look = _looks.pop((control.id, control.signed), None)
        if look is None:
            since = (timezone.now() - control.sent_at).total_seconds()
            look = Look(transit_time=max(0.0, since))
        _looks[control.id, control.signed] = look
        while len(_looks) > REMEMBERED:
            _looks.popitem(last=False)
        look.attempts += 1
    return look


def forget(control: ControlMessage) -> None:
    """Remove the state of a session's checks, because no further check is needed."""
    with _lock:
        _looks.pop((control.id, control.signed), None)


log = logging.getLogger("django_txmsg.control")

#: Longest pause, in seconds, between checks of a transaction that PostgreSQL reports as
#: in progress: the most that a slow commit delays its messages.
LOOK_EVERY = 0.2
#: Seconds after which a message for another database is dropped: a process of that
#: database would have received it long before.
FOREIGN_FOR = 300.0
#: Seconds between checks of a group of sessions, and seconds that a process has to send
#: what it stored.
LOOK_AT_GROUPS_EVERY = 1.0


#: Dispatches the messages of a session, by its database and its id.
Dispatch = Callable[[str, uuid.UUID], Any]


class LookAgain(Exception):
    """The session's outcome is not known yet. Keep the delivery, and check again in
    `after` seconds."""

    def __init__(self, after: float = 0.0, hold: float | None = None) -> None:
        #: Never at once: other messages are waiting, and so may be a stop.
        self.after = max(0.01, after)
        #: Seconds after which the delivery goes to the end of its queue, if not the
        #: usual ones.
        self.hold = hold
        super().__init__(f"look again in {self.after:.3f} s")


@dataclass(frozen=True, slots=True)
class Pending:
    """How many of a session's messages are pending, how many of these are due, and how
    many of the due messages are claimed."""

    count: int = 0
    due: int = 0
    leased: int = 0

    @classmethod
    def of(cls, using: str, session_id: uuid.UUID) -> Pending:
        """Count a session's messages in the outbox."""
        due = Q(due_at__lte=Now())
        found = (
            OutboxMessage.objects.using(using)
            .filter(PENDING, session_id=session_id)
            .aggregate(
                count=Count("pk"),
                due=Count("pk", filter=due),
                leased=Count("pk", filter=due & Q(Holds(rules.LEASED, now=Now()))),
            )
        )
        return cls(**found)


def handle(delivery: Delivery, dispatch: Dispatch, stop: threading.Event) -> None:
    """Check a session once. If no error is raised, the caller then settles the
    delivery.

    `dispatch(using, session_id)` sends a session's due messages. Raises LookAgain, and
    nothing else, in three cases: the outcome is not known yet; another process is
    sending the messages; a broker or the database does not answer.
    """
    try:
        control = ControlMessage.read(delivery)
    except ValueError as error:
        log.error("dropped an unreadable control message: %s", stored_text(error, 300))
        _tell(None, "unreadable", Look(attempts=1))
        return
    look = remember(control)
    if stop.is_set():
        raise LookAgain
    outcome = _look_safely(control, look, dispatch)
    forget(control)
    _tell(control, outcome, look)


def _look_safely(control: ControlMessage, look: Look, dispatch: Dispatch) -> str:
    """Return the session's outcome. Raises LookAgain if the outcome is not known yet,
    or after an unexpected error."""
    looking = database_health.retry(control.using, "sessions cannot be checked")
    if not looking.ready:
        raise LookAgain(look.pause(0.2, 5.0))
    try:
        outcome = _look(control, look, dispatch)
    except LookAgain:
        raise
    except Exception as error:
        if database_health.may_pass(error):
            looking.failed(error)
        elif isinstance(error, BrokerError):
            log.info("session %s waits: %s", control.session_id, error)
        else:
            log.exception("cannot check session %s yet", control.session_id)
        if database_health.is_away(error) or not look.committed or look.patient():
            raise LookAgain(look.pause(0.2, 5.0)) from error
    else:
        looking.worked()
        return outcome
    return _left_to_relay(control, "checking it fails again and again")


def _look(control: ControlMessage, look: Look, dispatch: Dispatch) -> str:
    """Return the session's outcome, or raise LookAgain."""
    if control.database and not database_identity.is_ours(
        control.using, control.database, control.sent_at
    ):
        return _hand_back(control, look)
    if control.oracle == "group":
        return _look_at_group(control, look, dispatch)
    verdict = Verdict.UNKNOWN
    if control.oracle == "arrival":
        verdict = Verdict.COMMITTED
    elif control.oracle == "transaction":
        verdict = database_identity.ask(control.using, control.transaction)
    if verdict is Verdict.IN_PROGRESS:
        raise LookAgain(look.pause(0.02, LOOK_EVERY))
    if verdict is Verdict.ABORTED:
        return "rolled_back"
    # Read after the outcome: a transaction's rows become visible no later than its end.
    pending = Pending.of(control.using, control.session_id)
    if verdict is Verdict.COMMITTED or pending.count:
        return _ship(control, look, pending, dispatch)
    if not control.signed:
        # The message is from before an upgrade, signed with a retired key, or a
        # stranger's. Committed messages are sent, as a relay would; no session is given
        # up because of it.
        log.warning(
            "dropped a control message for session %s that is not signed with this "
            "project's SECRET_KEY or one of SECRET_KEY_FALLBACKS",
            control.session_id,
        )
        return "unsigned"
    return _wait_or_give_up(control, look)


def _hand_back(control: ControlMessage, look: Look) -> str:
    """Return the message to its queue, so that a process that uses the session's
    database receives it. After FOREIGN_FOR seconds, drop the message instead."""
    age = (timezone.now() - control.sent_at).total_seconds()
    if (control.using, control.database) not in _foreign:
        _foreign.add((control.using, control.database))
        log.warning(
            "a control message for session %s is from database %s, and this process of "
            "the same service and SECRET_KEY uses database %s (%r). It goes back into "
            "its queue, and is dropped if no process of that database takes it. Give "
            'each of the two databases a service of its own: TXMSG["SERVICE"]. If they '
            "are one database, which was restarted, the clock of the sender's host is "
            "wrong",
            control.session_id,
            control.database,
            database_identity.current(control.using),
            control.using,
        )
    if age > FOREIGN_FOR:
        log.info(
            "dropped a control message for session %s from database %s: no process of "
            "that database has taken it",
            control.session_id,
            control.database,
        )
        return "another_database"
    # At the second check the message goes back: a pause lasts longer than half of the
    # next one.
    after = look.pause(0.2, 5.0)
    raise LookAgain(after, hold=after / 2)


#: Aliases of other databases whose messages arrived: one warning for each.
_foreign: set[tuple[str, str]] = set()


def _look_at_group(control: ControlMessage, look: Look, dispatch: Dispatch) -> str:
    """If the group has ended, send its messages that are still pending, and return the
    outcome. If the group has not ended, raise LookAgain. Before that, if the group has
    late messages, send them. (Normally, the process that stores a message also sends it
    in time.)"""
    using, group = control.using, control.session_id
    if control.joined_until is None:
        raise ValueError("a control group's message has no end")
    if not control_group.has_ended(using, group, control.joined_until):
        if _left_behind(using, group):
            dispatch(using, group)
        raise LookAgain(LOOK_AT_GROUPS_EVERY)
    # Read after the lock was free: by then the transaction's rows are visible.
    return _ship(control, look, Pending.of(using, group), dispatch)


def _left_behind(using: str, group: uuid.UUID) -> bool:
    """Return whether the group has late messages. A message is late if it is due, was
    stored more than LOOK_AT_GROUPS_EVERY seconds ago, and is not claimed now."""
    ago = Now() - dt.timedelta(seconds=LOOK_AT_GROUPS_EVERY)
    rows = OutboxMessage.objects.using(using).filter(PENDING, session_id=group)
    late = rows.filter(due_at__lte=Now(), created_at__lt=ago)
    return late.filter(Holds(rules.NOT_LEASED, now=Now())).exists()


def _ship(
    control: ControlMessage, look: Look, pending: Pending, dispatch: Dispatch
) -> str:
    look.committed = True
    if not pending.count:
        return "already_dispatched"
    if pending.due > pending.leased:
        dispatch(control.using, control.session_id)
        pending = Pending.of(control.using, control.session_id)
        if not pending.count:
            return "dispatched"
    if not pending.due:
        return _left_to_relay(control, f"{pending.count} messages are not due yet")
    if look.patient():
        # Its own process or a relay is sending, or died while sending; or an earlier
        # message of the same key must go first.
        raise LookAgain(look.pause(0.05, 1.0))
    return _left_to_relay(
        control, f"{pending.due} messages are due, but claimed or held back"
    )


def _left_to_relay(control: ControlMessage, why: str) -> str:
    log.info("session %s is left to the relay: %s", control.session_id, why)
    return "left_to_relay"


def _wait_or_give_up(control: ControlMessage, look: Look) -> str:
    sessions = SessionRecord.objects.db_manager(control.using)
    record = sessions.filter(pk=control.session_id).first()
    if record is not None and record.status == SessionStatus.COMMITTED:
        # Committed between the two queries, or dispatched before this one.
        if Pending.of(control.using, control.session_id).count:
            raise LookAgain
        return "already_dispatched"
    settings = conf.get().HTTP
    left = settings.MAX_COMMIT_DURATION - (time.monotonic() - look.began)
    if record is None and left > 0:
        raise LookAgain(look.pause(settings.COMMIT_DELAY_INCREMENT, left))
    if record is None and not sessions.give_up(control.session_id):
        raise LookAgain
    log.warning(
        "session %s did not commit within %g s of its control message and is given up; "
        "if it commits later, it fails and is rolled back. Raise "
        'TXMSG["HTTP"]["MAX_COMMIT_DURATION"] if this recurs',
        control.session_id,
        settings.MAX_COMMIT_DURATION,
    )
    return "given_up"


def _tell(control: ControlMessage | None, outcome: str, look: Look) -> None:
    signals.control_message_handled.send_robust(
        sender=None,
        session_id=control and control.session_id,
        using=control and control.using,
        outcome=outcome,
        attempts=look.attempts,
        transit_time=look.transit_time,
        headers=control.headers if control else {},
    )
