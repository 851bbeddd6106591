"""What the receiver of a control message does: looks after the session that sent it.

If the session has committed and its process has died, its messages are dispatched here.
If it never committed, the control message ends quietly. Until that is known, or as long
as somebody else is sending, it is looked at again.
"""

from __future__ import annotations

import datetime as dt
import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from django.db.models import Count, Q
from django.db.models.functions import Now
from django.utils import timezone

from .. import conf, signals
from ..brokers.base import Delivery
from ..errors import BrokerError
from ..models import OutboxMessage, SessionRecord
from ..models.outbox import PENDING
from ..models.session_record import SessionStatus
from ..runtime import database_health
from . import commit_status, control_group_lock, database_identity
from .commit_status import Verdict
from .control_message import ControlMessage
from .control_state import Look, forget, remember

log = logging.getLogger("django_txmsg.control")

#: Longest pause, in seconds, between looks at a transaction that PostgreSQL says is
#: in progress: what a slow commit adds to a message's way at most.
LOOK_EVERY = 0.2
#: Seconds after which another database's message is dropped: a process of that database
#: would have taken it long before.
FOREIGN_FOR = 300.0
#: Seconds between looks at a group of sessions, and those that their own processes have
#: to send what they stored.
LOOK_AT_GROUPS_EVERY = 1.0


class LookAgain(Exception):
    """The session's end is not known yet: keep the delivery, and ask again `after`
    so many seconds. `control` is what was looked after."""

    def __init__(self, after: float = 0.0, hold: float | None = None) -> None:
        #: Never at once: others are waiting, and so is who wants to stop.
        self.after = max(0.01, after)
        #: Seconds after which the delivery goes to the end of its queue, if not the
        #: usual ones.
        self.hold = hold
        self.control: ControlMessage | None = None
        super().__init__(f"look again in {self.after:.3f} s")


@dataclass(frozen=True, slots=True)
class Pending:
    """What has not left of a session: how many messages, how many of them are due, and
    how many of those somebody is sending."""

    count: int = 0
    due: int = 0
    leased: int = 0

    @classmethod
    def of(cls, using: str, session_id: uuid.UUID) -> Pending:
        """Ask the outbox."""
        due = Q(due_at__lte=Now())
        found = (
            OutboxMessage.objects.using(using)
            .filter(PENDING, session_id=session_id)
            .aggregate(
                count=Count("pk"),
                due=Count("pk", filter=due),
                leased=Count("pk", filter=due & Q(lease_until__gt=Now())),
            )
        )
        return cls(**found)


def handle(
    delivery: Delivery,
    dispatch: Callable[[str, uuid.UUID], Any],
    stop: threading.Event,
) -> None:
    """Look once after a session's messages; on return the delivery can be settled.

    `dispatch(using, session_id)` sends what is due of a session. Raises LookAgain, and
    nothing else, when it is too early to tell, when somebody else is sending, or when
    a broker or the database cannot be asked.
    """
    try:
        control = ControlMessage.read(delivery)
    except ValueError as error:
        log.error("dropped an unreadable control message: %s", error)
        _tell(None, None, "unreadable", Look(attempts=1), {})
        return
    look = remember(control)
    try:
        if stop.is_set():
            raise LookAgain
        outcome = _look_safely(control, look, dispatch)
    except LookAgain as again:
        again.control = control
        raise
    forget(control)
    _tell(control.session_id, control.using, outcome, look, control.headers)


def _look_safely(
    control: ControlMessage, look: Look, dispatch: Callable[[str, uuid.UUID], Any]
) -> str:
    """Return the session's outcome, or raise LookAgain, whatever is broken."""
    looking = database_health.retry(control.using, "sessions cannot be looked after")
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
            log.exception("cannot look after session %s yet", control.session_id)
        if database_health.is_away(error) or look.patient():
            raise LookAgain(look.pause(0.2, 5.0)) from error
    else:
        looking.worked()
        return outcome
    return _left_to_relay(control, "looking after it fails again and again")


def _look(
    control: ControlMessage, look: Look, dispatch: Callable[[str, uuid.UUID], Any]
) -> str:
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
        verdict = commit_status.ask(control.using, control.transaction)
    if verdict is Verdict.IN_PROGRESS:
        raise LookAgain(look.pause(0.02, LOOK_EVERY))
    if verdict is Verdict.ABORTED:
        return "rolled_back"
    # Only now: the rows of a transaction are not seen before its end is.
    pending = Pending.of(control.using, control.session_id)
    if verdict is Verdict.COMMITTED or pending.count:
        return _ship(control, look, pending, dispatch)
    if not control.signed:
        # From before an upgrade, or of another key's time, or a stranger's: what has
        # committed leaves, as it would by a relay, and nothing is given up for it.
        log.warning(
            "dropped a control message for session %s that is not signed with this "
            "project's SECRET_KEY or one of SECRET_KEY_FALLBACKS",
            control.session_id,
        )
        return "unsigned"
    return _wait_or_give_up(control, look)


def _hand_back(control: ControlMessage, look: Look) -> str:
    """Leave the message to a process of its database: it goes back into the queue."""
    age = (timezone.now() - control.sent_at).total_seconds()
    over = age > FOREIGN_FOR
    first = (control.using, control.database) not in _foreign
    _foreign.add((control.using, control.database))
    log.log(
        logging.WARNING if first else logging.INFO,
        "a control message for session %s is from database %s, and this process of the "
        "same service and SECRET_KEY uses database %s (%r). %s. Give each of the two "
        'databases a service of its own: TXMSG["SERVICE"]',
        control.session_id,
        control.database,
        database_identity.current(control.using),
        control.using,
        "It is dropped, as no process of that database has taken it"
        if over
        else "It goes back into its queue",
    )
    if over:
        return "another_database"
    after = look.pause(0.2, 5.0)
    raise LookAgain(after, hold=after)


#: Of which other databases messages have come, by alias: a warning for each.
_foreign: set[tuple[str, str]] = set()


def _look_at_group(
    control: ControlMessage, look: Look, dispatch: Callable[[str, uuid.UUID], Any]
) -> str:
    """Send what somebody did not; return the outcome once the group is over."""
    using, group = control.using, control.session_id
    if control.joined_until is None:
        raise ValueError("a control group's message does not say until when it is one")
    verdict = control_group_lock.ask(using, group, control.joined_until)
    if verdict is not control_group_lock.Verdict.OVER:
        if _left_behind(using, group):
            dispatch(using, group)
        raise LookAgain(LOOK_AT_GROUPS_EVERY)
    # Only now: the rows of a transaction are not seen before its lock is free.
    return _ship(control, look, Pending.of(using, group), dispatch)


def _left_behind(using: str, group: uuid.UUID) -> bool:
    """Whether rows wait whose own process should have sent them by now."""
    ago = Now() - dt.timedelta(seconds=LOOK_AT_GROUPS_EVERY)
    rows = OutboxMessage.objects.using(using).filter(PENDING, session_id=group)
    late = rows.filter(due_at__lte=Now(), created_at__lt=ago)
    return late.exclude(lease_until__gt=Now()).exists()


def _ship(
    control: ControlMessage,
    look: Look,
    pending: Pending,
    dispatch: Callable[[str, uuid.UUID], Any],
) -> str:
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
        # Its own process, or a relay, is sending, or died while it was; or an earlier
        # message of the same key goes first.
        raise LookAgain(look.pause(0.05, 1.0))
    return _left_to_relay(control, f"{pending.due} messages are due and not to be had")


def _left_to_relay(control: ControlMessage, why: str) -> str:
    log.info("session %s is left to the relay: %s", control.session_id, why)
    return "left_to_relay"


def _wait_or_give_up(control: ControlMessage, look: Look) -> str:
    sessions = SessionRecord.objects.db_manager(control.using)
    record = sessions.filter(pk=control.session_id).first()
    if record is not None and record.status == SessionStatus.COMMITTED:
        # Committed between the two queries, or dispatched before we came.
        if Pending.of(control.using, control.session_id).count:
            raise LookAgain
        return "already_dispatched"
    settings = conf.get().HTTP
    left = settings.MAX_COMMIT_DURATION - look.waited
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


def _tell(
    session_id: uuid.UUID | None,
    using: str | None,
    outcome: str,
    look: Look,
    headers: Mapping[str, str],
) -> None:
    signals.control_message_handled.send_robust(
        sender=None,
        session_id=session_id,
        using=using,
        outcome=outcome,
        attempts=look.attempts,
        transit_time=look.transit_time,
        headers=headers,
    )
