"""Hops 6 and 7 for Celery: one delivery of a task whose work takes effect only once.

The steps are: record the delivery → begin a transaction → run the task → store its
result → commit → send its retry, its replacement, or its links and the rest of its
chain. Celery then acknowledges or rejects the delivery.

If the worker is killed before the commit, the next delivery runs the task again. If the
worker is killed after the commit, the next delivery only returns the stored result and
sends the messages.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import Any

from celery.exceptions import (
    Ignore,
    MaxRetriesExceededError,
    Reject,
    Retry,
)
from django.db import DatabaseError, InterfaceError, connections, router
from django.db.models import F
from django.db.models.functions import Now
from kombu.exceptions import EncodeError
from kombu.serialization import dumps, loads
from kombu.utils import json

from .. import conf, signals, wire
from ..brokers.celery_publication import Publication
from ..consuming import protocol
from ..consuming.protocol import Conflicts, Undecided, guarded
from ..django_internals import abandon, in_block, raw
from ..envelope.failure import Failure, cause_of
from ..envelope.handler import ran
from ..envelope.message import Message
from ..envelope.stage_options import TransactionDefinition
from ..errors import TaskGivenUp
from ..models import InboxMessage
from ..models.inbox_arrival import InboxRecord
from ..runtime import database_health
from ..sending.scope import Scope, in_scope
from . import calling, following
from .calling import identity, place

log = logging.getLogger("django_txmsg.celery")

_NOTE, _ENCODING = "celery", "content-encoding"


def written(
    task: Any, result: Any, later: Sequence[Publication], ignored: Ignore | None
) -> dict[str, Any]:
    """Return the columns that store the task's result and its messages to send. The
    dict is empty if a redelivery would have nothing to return or send."""
    if result is None and ignored is None and not later:
        return {}
    note: dict[str, Any] = {}
    if ignored is not None:
        note["ignored"] = str(ignored)
    if later:
        note["later"] = [[one.text(), one.body, one.content_type] for one in later]
    serializer = task.serializer or task.app.conf.task_serializer
    try:
        content_type, encoding, data = dumps(result, serializer=serializer)
    except EncodeError as error:
        log.warning(
            "the result of %s cannot be stored, so copies of its message will return "
            "None: %s", task.name, error,
        )  # fmt: skip
        content_type, encoding, data = dumps(None, serializer="json")
    return {
        "headers": {
            wire.CONTENT_TYPE: content_type,
            _ENCODING: encoding,
            _NOTE: json.dumps(note),
        },
        "body": data.encode(encoding) if isinstance(data, str) else data,
    }


def run_once(task: Any, args: Any, kwargs: Any) -> Any:
    """Run the task of the current request, and return its result. If an earlier
    delivery has done the task, return the result of that delivery.

    If the task raises an exception, its work is rolled back and the exception is
    raised. Raises Reject, so that the broker redelivers the message, if the database or
    Celery's broker is unavailable, or if the database refuses a statement of this
    package. This counts as an attempt only if the connection to the database ended
    while the task ran: the task itself may have crashed the server.
    """
    once = _Once(task, args, kwargs)
    try:
        result = once.process()
        if not task.request.is_eager:
            following.go_on(task, result)
        return result
    except (DatabaseError, InterfaceError, Undecided) as raised:
        refused = isinstance(raised, Undecided)
        error = raised.error if isinstance(raised, Undecided) else raised
        if task.request.is_eager or not (refused or database_health.is_away(error)):
            raise error from cause_of(error)  # by which it is known
        lost_connection = not refused and protocol.is_outage(error, once.ran_on)
        connections[once.using].close()
        if not lost_connection:
            once.take_back()
        log.warning(
            "task %s[%s] goes back to its queue, since the database refuses it: %s",
            task.name, task.request.id, error,
        )  # fmt: skip
        threading.Event().wait(following.PAUSE)
        raise Reject(error, requeue=True) from error
    finally:
        # Celery calls them if this fails; not before, because a retry and a replacement
        # take them over unchanged.
        following.identify_errbacks(task.request)


class _Once:
    """One delivery of a task's message."""

    def __init__(self, task: Any, args: Any, kwargs: Any) -> None:
        self.task, self.args, self.kwargs = task, args, kwargs
        request = task.request
        self.using = task.using or str(router.db_for_write(InboxMessage))
        self.message = Message(
            id=identity(request.id, request.replaced_task_nesting or 0),
            destination=place(task.name),
            body=None,
            correlation_id=str(request.root_id or request.id)[:255],
            service=conf.get().SERVICE,
        )
        self.inbox = InboxMessage.objects.db_manager(self.using)
        self._inbox_record: InboxRecord | None = None
        #: The driver's connection on which the task was started.
        self.ran_on: Any = None

    def process(self) -> Any:
        """Record the delivery, run the task if necessary, and return its result."""
        record, begun = self._record()
        if record.processed:
            return self._again(record)
        if not record.dead and self._too_often(record):
            given_up = TaskGivenUp(
                f"{_most()} deliveries of this task began and never ended: each time "
                f"its worker died, or lost its connection to the database. Look for "
                f"memory, signals and native crashes."
            )
            if self._fail(record, given_up):
                raise given_up
            return self._again(record)
        conflicts = Conflicts()
        while True:
            try:
                return self._attempt(record, begun)
            except protocol.LostRace:
                found = self.inbox.recall(
                    record.id, self.message.destination, record.message_id
                )
                if found is not None and not found.dead:
                    return self._again(record)
                # Another delivery has failed meanwhile. Or a crash of the server has
                # lost the record, whose commit does not wait for the disk; a
                # transaction pooler in between hid the crash.
                record, begun = self._record()
            except Reject as rejected:
                if rejected.requeue:
                    self.take_back()
                else:
                    self._fail(record, rejected)
                raise
            except (Retry, Ignore, Undecided):
                raise
            except Exception as error:
                if begun:
                    abandon(connections[self.using])
                begun = False
                if conflicts.mends(error):
                    threading.Event().wait(conflicts.pause)
                    continue
                if not database_health.is_away(error) and not self._fail(record, error):
                    # A soft time limit, say, that came after the commit.
                    return self._again(record)
                raise

    def _record(self) -> tuple[InboxRecord, bool]:
        self._inbox_record, begun = protocol.record(
            self.inbox,
            self.message.destination,
            self.message,
            runs=lambda record: not self._too_often(record),
        )
        if self._inbox_record.dead:
            # It failed, as Celery has reported, and was sent again.
            row = self.inbox.filter(pk=self._inbox_record.id)
            row.update(dead_at=None, attempts=1)
        return self._inbox_record, begun

    def take_back(self) -> None:
        """Subtract this attempt, because the task did not cause the failure."""
        if self._inbox_record is None:
            return
        row = self.inbox.filter(
            pk=self._inbox_record.id, processed_at=None, attempts__gt=0
        )
        with contextlib.suppress(DatabaseError, InterfaceError):
            row.update(attempts=F("attempts") - 1)

    def _too_often(self, record: InboxRecord) -> bool:
        return record.attempt - int(self.task.request.retries or 0) > _most()

    def _attempt(self, record: InboxRecord, begun: bool) -> Any:
        run, outer = calling.Run(), calling.current_run.get()
        calling.current_run.set(run)
        self.ran_on = raw(connections[self.using])
        ignored: list[Ignore] = []

        def work() -> Any:
            with in_scope(self._scope()), guarded(self.using):
                try:
                    return ran(self.task.run(*self.args, **self.kwargs))
                except Ignore as error:
                    # It is done, or its replacement is.
                    ignored.append(error)

        def finish(result: Any, late: bool) -> None:
            """Store the task's result, and the messages that it sends. A redelivery
            returns this result, and sends these messages, without running the task."""
            if late:
                self.inbox.finish([record.id])
            kept = written(
                self.task, result, run.later, ignored[0] if ignored else None
            )
            if kept:
                self.inbox.filter(pk=record.id).update(**kept, processed_at=Now())

        try:
            result, _ = protocol.once(
                TransactionDefinition(using=self.using),
                begun=begun,
                take=lambda: self.inbox.take(record.id),
                run=work,
                finish=finish,
            )
        except Retry:
            # Rolled back; only now is the next attempt sent.
            following.send(self.task, run.later)
            raise
        finally:
            calling.current_run.set(outer)
        following.send(self.task, run.later)
        if ignored:
            raise ignored[0]
        return result

    def _scope(self) -> Scope:
        service, cause = conf.get().SERVICE, self.message
        return Scope(
            session_id=wire.session_id(service, cause.id, cause.destination),
            using=self.using,
            cause=cause,
            stage=cause.destination,
        )

    def _again(self, record: InboxRecord) -> Any:
        """Send the stored messages again, and return the stored result. The worker of
        the first delivery may have been killed before it sent the messages. Raises
        Ignore if the task raised Ignore."""
        row = self.inbox.filter(pk=record.id).values("headers", "body").first()
        signals.announce(
            signals.message_duplicate,
            id=self.message.id,
            destination=self.message.destination,
            stage=self.message.destination,
        )
        if row is None or row["body"] is None:
            return None
        headers = row["headers"]
        note, kind = json.loads(headers[_NOTE]), headers[wire.CONTENT_TYPE]
        later = [Publication.read(*one) for one in note.get("later", ())]
        following.send(self.task, later)
        if "ignored" in note:
            raise Ignore(note["ignored"])
        return loads(bytes(row["body"]), kind, headers[_ENCODING], accept={kind})

    def _fail(self, record: InboxRecord, error: BaseException) -> bool:
        """Record a failure. Returns False if the task's work is committed nevertheless,
        by this attempt or by another delivery."""
        if in_block(connections[self.using]):
            return True
        text = Failure.of(error).exception
        if isinstance(error, MaxRetriesExceededError):
            # Its own text contains the arguments.
            text = (
                f"MaxRetriesExceededError: tried {self.task.request.retries + 1} times"
            )
        with contextlib.suppress(DatabaseError, InterfaceError):
            if not self.inbox.mark_dead(record.id, text):
                return not self.inbox.filter(
                    pk=record.id, processed_at__isnull=False
                ).exists()
        return True


def _most() -> int:
    return conf.get().REDELIVERY.MAX_REDELIVERIES + 1
