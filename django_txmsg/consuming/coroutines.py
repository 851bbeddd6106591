"""Runs handlers that are coroutine functions, at stages with `transaction="none"`.

All coroutines of a process run in one event loop. So all handlers can share a client
that belongs to the loop, such as a pool of HTTP connections. The stage's thread waits
for its coroutine, so everything else works as with a plain function.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

from asgiref.sync import ThreadSensitiveContext, async_to_sync, sync_to_async
from django.db import connections
from django.db.backends.signals import connection_created

from ..django_internals import in_block
from ..envelope.handler import Handler
from ..envelope.message import Message
from ..runtime.connections import leave_blocks
from ..runtime.per_process import PerProcess
from ..runtime.thread_group import start_daemon
from ..stages import Stage
from . import deadline
from .protocol import refuse_left_open

#: The name of the loop's thread.
THREAD = "txmsg-loop"


def blocking(stage: Stage) -> Handler:
    """Return the stage's handler as a function that waits for the coroutine. The
    coroutine has the caller's context, and is cancelled at the caller's deadline."""
    handler, using = stage.handler, stage.definition.using

    def wait(message: Message) -> Any:
        if in_block(connections[using]):
            # Inside a TestCase, the handler's queries belong to the test's transaction.
            return _result(async_to_sync(_caught)(handler, message))
        work = _alone(handler, message)
        return _result(asyncio.run_coroutine_threadsafe(work, _loop()).result())

    return wait


async def _alone(handler: Handler, message: Message) -> Any:
    """Run a handler. The handler's queries use a thread and a connection of their own,
    which are closed when the handler ends. So a broken connection affects only this
    message."""
    async with ThreadSensitiveContext():
        connected: list[str] = []
        _connected.set(connected)
        work = asyncio.ensure_future(_caught(handler, message))
        limit = deadline.current.get()
        if limit is not None:
            loop = asyncio.get_running_loop()
            limit.interrupt = partial(loop.call_soon_threadsafe, work.cancel)
        left_open: list[str] = []
        try:
            result = await work
        finally:
            if connected:  # otherwise this would start the thread first
                left_open += await sync_to_async(_close)()
        refuse_left_open(left_open)
        return result


def _close() -> list[str]:
    """Close the connections of a coroutine. Returns the databases on which it has left
    transactions open."""
    left_open = leave_blocks()
    connections.close_all()
    return left_open


def _note(connection: Any, **_: Any) -> None:
    connected = _connected.get()
    if connected is not None:
        connected.append(connection.alias)


#: The databases to which the running coroutine has connected.
_connected: ContextVar[list[str] | None] = ContextVar("txmsg_connected", default=None)
connection_created.connect(_note, dispatch_uid="django_txmsg.coroutines")


async def _caught(handler: Handler, message: Message) -> Any:
    """Run a handler. If the handler raises SystemExit or KeyboardInterrupt, return the
    exception: if it were raised here, the event loop and all other handlers would
    end."""
    try:
        return await handler(message)
    except (SystemExit, KeyboardInterrupt) as error:
        return error


def _result(ended: Any) -> Any:
    if isinstance(ended, BaseException):
        raise ended
    return ended


def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    start_daemon(THREAD, _run, loop)
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the event loop for ever. If a task of a handler ends the loop by SystemExit
    or by stopping it, start the loop again, so that the other coroutines continue."""
    while True:
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


_loop = PerProcess(_started)
