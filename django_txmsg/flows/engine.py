"""Continues a run: one message calls one step in one transaction.

The stage's inbox drops duplicates of a message. Each message names a turn of its run,
and continues the run only if this is the run's current turn. If several messages name
the same turn, for example a reply and a deadline, only the first of them continues the
run.
"""

from __future__ import annotations

import datetime as dt

from .. import codecs, conf, wire
from ..envelope.message import Message, carried
from ..errors import ConfigurationError, DecodeError
from ..models import Run
from ..models.fields import clock
from ..models.run import Outcome, WaitsFor
from ..sending.answering import Address
from ..sending.undoing import given_up, revoke, withdraw
from . import joining
from .declaration import Declaration
from .going import Going, checked, late
from .sending import send_signal
from .values import Cancelled, Fail

#: How long a signal waits for a run that start() has not stored yet, and between two
#: tries at most and at least.
SIGNAL_WAITS = dt.timedelta(minutes=15)
MAX_PAUSE = dt.timedelta(minutes=1)
MIN_PAUSE = dt.timedelta(seconds=1)


def begin(declared: Declaration, message: Message) -> None:
    """Begin a run with its first message. If `start()` sent the message, the run's row
    exists already. Otherwise create the row. An edited copy begins the run of the
    original message, for which a caller or a key may be waiting."""
    runs = Run.objects.db_manager(declared.using)
    run_id = wire.original_id(message.id, message.conversation)
    run = runs.locked(run_id)
    if run is None:
        caller = Address.of(message.conversation)
        run = declared.new_run(
            run_id=run_id,
            caller={} if caller is None else _back(message),
            first_run=wire.uuid_or_none(message.conversation.get(wire.FLOW)) or run_id,
            baggage=_baggage(message),
            correlation_id=message.correlation_id or str(run_id),
        )
        run.save(using=declared.using, force_insert=True)
    elif run.waits_for != WaitsFor.START:
        return late(declared, message, run.run_id)
    going = Going(declared, run, message)
    going.apply(going.call(declared.step("start"), message.body))
    return None


def go_on(declared: Declaration, message: Message) -> None:
    """Continue a run with a message that was sent to the flow's destination
    `NAME.steps`."""
    given = message.conversation
    if wire.UNDOES in given:
        return _cancelled(declared, message)
    text = given.get(wire.TICKET, "")
    if text.startswith(f"{wire.SIGNAL};"):
        return _signalled(declared, message)
    # A consumer that is not of this package returns it as JMS does.
    text = text or message.correlation_id or ""
    try:
        address, _, branch = text.partition("/")
        run_id, turn = wire.read_ticket(address)
    except ValueError:
        raise DecodeError("ticket", "it names no run and no turn") from None
    if branch:
        if not joining.answered(declared, message, turn, branch):
            late(declared, message, run_id)
        return None
    run = Run.objects.db_manager(declared.using).take(run_id, turn)
    if run is None or run.waits_for == WaitsFor.START:
        return late(declared, message, run_id)
    going = Going(declared, run, message)
    if not run.failing:
        going.continued()
    else:
        going.undone()
    return None


def _signalled(declared: Declaration, message: Message) -> None:
    try:
        _, name, at, key = message.conversation[wire.TICKET].split(";", 3)
        sent = wire.parse_instant(at)
        if not key:
            raise ValueError  # any open run without a key would take it
    except ValueError:
        raise DecodeError("ticket", "it names no signal, instant and key") from None
    runs = Run.objects.using(declared.using).filter(
        service__in=conf.get().services, flow=declared.name, key=key
    )
    taken = declared.signal(name)
    # A signal that overtakes the message of start() would take the place of that step.
    begun = runs.filter(ended_at=None).exclude(waits_for=WaitsFor.START)
    run = begun.select_for_update().first()
    if run is not None and not run.failing:
        going = Going(declared, run, message)
        going.signalled(going.call(taken, message.body.read(taken.reader)))
        return
    now = clock(declared.using)
    # A time in the future, from another system, would never become too old.
    since = min(sent, now)
    if run is None:
        over = runs.filter(ended_at__gte=since).exists()
    else:
        # A run that goes back to a step will wait again.
        over = run.kept_undos is None
    if over:
        late(declared, message, None if run is None else run.run_id)
        return
    age = now - since
    # A run that start() has stored begins with its first message, however late that is.
    if age >= SIGNAL_WAITS and not runs.filter(ended_at=None).exists():
        raise DecodeError(
            "no_run", f"no run of {declared.name!r} with the key {key!r} has begun"
        )
    # The first message may be a dead letter for days.
    pause = min(max(age, MIN_PAUSE), max(MAX_PAUSE, age / 15))
    body = message.body.read(taken.reader)
    send_signal(declared, key, body, since=since, delay=pause)


def _cancelled(declared: Declaration, message: Message) -> None:
    """Cancel a run. The request comes from a calling flow that undoes its work, or from
    code of this service."""
    given = message.conversation
    try:
        undone = wire.Undone.parse(given[wire.UNDOES])
    except ValueError:
        raise DecodeError("undoes", "it names no run") from None
    runs = Run.objects.db_manager(declared.using)
    # Only a flow sends HOP. The sender of any other cancel waits for no answer: the
    # address is that of the run's caller. A run that has begun answers the caller
    # itself. If the run's first message was revoked before, or a relay gave it up, the
    # caller has an answer.
    ours = wire.HOP not in given
    name, using = declared.name, declared.using
    # Without a row, it only waits for its first message, which may never come.
    begun = undone.answered or runs.filter(run_id=undone.request_id).exists()
    first = not begun and revoke(undone, name, name, using)
    unanswered = first and not given_up(undone, name, using)
    # A step locks its message before the run, and so does this.
    if runs.filter(run_id=undone.request_id, waits_for=WaitsFor.START).exists():
        withdraw(undone, name, using)
    run = runs.locked(undone.request_id)
    why = message.body.read(codecs.reader(Cancelled))
    caller = Address.of(given) if unanswered or not ours else None
    if run is not None and run.outcome == Outcome.HANDED_OVER:
        assert run.request_id is not None
        assert run.ended_at is not None
        called = wire.Undone(run.request_id, run.ended_at, undone.answered)
        if ours:
            # Its successor has the same caller. Each cancel has the address, because
            # another one may never arrive. The first that arrives sends the answer. But
            # if a relay gave up the successor's first message, only this database may
            # have the dead letter, and the caller has an answer.
            given = {wire.FLOW: str(run.first_run)}
            if not given_up(called, run.asked, using):
                given |= run.caller
        headers = {**given, wire.UNDOES: str(called)}
        declared.send(why, headers, to=run.asked + wire.STEPS)
    elif run is None or run.ended_at is not None:
        if caller is None:
            return late(declared, message, undone.request_id)
        caller.send(why, using=declared.using, broker=declared.broker)
    else:
        going = Going(declared, run, message)
        if caller is not None:
            # The caller has continued already; the answer reports that everything is
            # undone.
            run.caller = _back(message)
        if run.failing:
            if run.kept_undos is not None:
                # It does not go back any more; everything is undone.
                run.kept_undos = None
                going._keep_answer(why)
            going.store()
            return None
        # Before the first step, the state is empty, and that step may never come: its
        # message may have been discarded.
        begun = run.waits_for != WaitsFor.START
        on_cancel = declared.on_cancel if begun else None
        going.signalled(Fail(why) if on_cancel is None else going.call(on_cancel, why))
    return None


def _back(message: Message) -> dict[str, str]:
    """Return those headers of a caller's message that the answer to the caller must
    contain."""
    return {
        name: value
        for name, value in message.conversation.items()
        if name in (wire.REPLY_TO, wire.TICKET)
    }


def _baggage(message: Message) -> dict[str, str]:
    """Return the baggage in a message's headers. Raises DecodeError if the run could
    not send it with its own messages: another attempt would not help."""
    given = {
        name.removeprefix(wire.PROP): carried(value)
        for name, value in message.conversation.items()
        if name.startswith(wire.PROP)
    }
    try:
        return checked(given)
    except ConfigurationError as error:
        raise DecodeError("malformed_headers", str(error)) from None
