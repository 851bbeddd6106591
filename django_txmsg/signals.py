"""The events of a message. Each event writes one log line and sends one Django signal.

A signal is sent after the commit that it reports. If a receiver raises an exception,
the exception is only logged. If it is not an `Exception`, the receivers after this one
are not called. Log records have the event's data as attributes
(`txmsg_id`, `txmsg_destination`, `txmsg_stage`, `txmsg_attempt`, `txmsg_duration`).
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any

from django.dispatch import Signal

from .envelope.failure import is_interrupt

log = logging.getLogger("django_txmsg.messages")


class _Signal(Signal):
    """A signal whose receivers cannot change what it reports. Django lets an exception
    of a receiver through if it is not an `Exception`: a cancellation, a time-out of
    gevent, SystemExit. After a commit it would count as a failure of the handler, or
    end a thread."""

    def send_robust(self, sender: Any, **named: Any) -> list[tuple[Any, Any]]:
        try:
            return super().send_robust(sender, **named)
        except BaseException as error:
            if is_interrupt(error):
                raise
            with suppress(Exception):
                log.exception(
                    "a receiver of a signal raised, or the log did: %r", error
                )
            return []


message_stored = _Signal()
"""A transaction that stored a message was committed.
Arguments: id, destination, using."""

message_dispatched = _Signal()
"""The broker gave its receipt. Arguments: id, destination, broker, attempt."""

message_processed = _Signal()
"""A stage's transaction was committed. Arguments: id, destination, stage, attempt,
duration (seconds in the stage), critical_time (seconds since it was stored, by two
clocks, or None), employed (whether the stage used the database), db ("used" or
"unused")."""

message_duplicate = _Signal()
"""A copy of a message that the stage has already processed, parked or buried was
dropped. Arguments: id, destination, stage."""

message_redelivered = _Signal()
"""An attempt failed and another will follow. Arguments: id, destination, stage,
attempt, delay (seconds), error."""

message_buried = _Signal()
"""A message became a dead letter. Arguments: id, destination, stage, attempt,
reason, error."""

messages_committed = _Signal()
"""Rows of the outbox were committed; wakes the dispatcher. If a savepoint was rolled
back by hand, some of the ids have no row. Arguments: using, broker, ids (of rows)."""

alert_changed = _Signal()
"""A relay has raised an alert of `TXMSG["ALERTS"]`, or ended it. Arguments: name, kind,
status ("firing" or "resolved"), text."""

lease_lost = _Signal()
"""Another relay has claimed the messages of this one. Arguments: count, broker."""

outcome_unknown = _Signal()
"""No receipt came; the messages will be sent again. Arguments: count, broker."""

dangerous_window = _Signal()
"""In best_effort_1pc, the time between the database's commit and the broker's.
Arguments: stage, seconds, failed (the broker's commit did not follow), employed."""

session_ended = _Signal()
"""An outbox session, of an HTTP request or not, ended. Arguments: session_id, using,
outcome ("committed", "rolled_back", "failed", or "joined" if an outer transaction
decides), duration (seconds), stored (messages)."""

control_message_sent = _Signal()
"""A session sent its control message before its commit. Arguments: session_id, using,
outcome ("sent" or "failed"), duration (seconds), error."""

control_message_handled = _Signal()
"""A control message was settled. Arguments: session_id, using, outcome ("dispatched",
"already_dispatched", "rolled_back", "given_up", "left_to_relay", "unsigned",
"another_database", "unreadable"), attempts (checks of the session), transit_time
(seconds from its sending to its first arrival, by two clocks, or None), headers (those
that were signed: the session's metadata, for example)."""

flow_ended = _Signal()
"""A run of a flow has ended. Arguments: flow, run_id, outcome ("answered", "failed",
"handed_over")."""

flow_late = _Signal()
"""A message for a run came after the run had gone on, and was dropped.
Arguments: id, flow, run_id."""

_EVENTS: dict[Signal, tuple[str, int]] = {
    message_stored: ("stored", logging.INFO),
    message_dispatched: ("dispatched", logging.INFO),
    message_processed: ("processed", logging.INFO),
    message_duplicate: ("duplicate dropped", logging.INFO),
    message_redelivered: ("redelivered", logging.WARNING),
    message_buried: ("buried", logging.ERROR),
}


def announced(signal: Signal) -> bool:
    """Return whether this event is logged or has a receiver. If not, the caller need
    not collect the event's arguments."""
    return bool(signal.receivers) or log.isEnabledFor(_EVENTS[signal][1])


def on_terminal(signal: Signal) -> bool:
    """Return whether a handler of the project logs this event to stdout or stderr."""
    return printed(log, _EVENTS[signal][1])


def printed(log: logging.Logger, level: int) -> bool:
    """Return whether a handler of the project writes a logger's records of this level
    to stdout or stderr."""
    logger: logging.Logger | None = log if log.isEnabledFor(level) else None
    while logger:
        for handler in logger.handlers:
            stream = getattr(handler, "stream", handler)
            if handler.level <= level and stream in (sys.stdout, sys.stderr):
                return True
        logger = logger.parent if logger.propagate else None
    return False


def announce(signal: Signal, **facts: Any) -> None:
    """Log one event of a message, and send its signal."""
    event, level = _EVENTS[signal]
    if log.isEnabledFor(level):
        shown = " ".join(
            f"{name}={value:.4f}" if isinstance(value, float) else f"{name}={value}"
            for name, value in facts.items()
            if value is not None and value != "" and name != "error"
        )
        if facts.get("error"):
            shown += f" error={facts['error']!r}"
        extra = {f"txmsg_{name}": value for name, value in facts.items()}
        extra["txmsg_event"] = event
        # A handler may fail to open its file. What is announced is committed, so that
        # must not count as a failure.
        with suppress(Exception):
            log.log(level, "%s %s", event, shown, extra=extra)
    signal.send_robust(sender=None, **facts)
