"""Around hop 8: handlers that are coroutine functions, of stages with
`transaction="none"`.

All coroutines of a process run in one event loop, so all messages can share a client
that belongs to a loop, such as a pool of HTTP connections. The stage's thread waits for
its coroutine, so everything else about a stage stays as it is.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from asgiref.sync import ThreadSensitiveContext, async_to_sync, sync_to_async
from django.db import connections

from ..django_internals import in_block
from ..envelope.handler import Handler
from ..envelope.message import Message
from ..runtime.per_process import PerProcess
from ..stages import Stage
from .deadline import Deadline


def blocking(stage: Stage) -> Handler:
    """Return the stage's handler as a function that waits for the coroutine. The
    coroutine has the caller's context, and is cancelled after the stage's timeout."""
    handler, using, seconds = stage.handler, stage.definition.using, stage.timeout

    def wait(message: Message) -> Any:
        if in_block(connections[using]):
            # Inside a TestCase, the handler's queries belong to the test's transaction.
            return _result(async_to_sync(_caught)(handler, message))
        work = _alone(handler, message, seconds)
        limit = Deadline(stage.name, seconds or 0.0, message.id)
        try:
            ended = asyncio.run_coroutine_threadsafe(work, _loop()).result()
        except asyncio.TimeoutError:
            if seconds is not None and limit.passed:
                raise limit.error() from None
            raise  # the handler raised it
        return _result(ended)

    return wait


async def _alone(handler: Handler, message: Message, seconds: float | None) -> Any:
    """Run a handler. Its queries use a separate thread and connection, which end with
    it, so a broken connection affects only this message."""
    async with ThreadSensitiveContext():
        try:
            return await asyncio.wait_for(_caught(handler, message), seconds)
        finally:
            await sync_to_async(connections.close_all)()


async def _caught(handler: Handler, message: Message) -> Any:
    """Run a handler. Returns exceptions that would end the event loop for all
    handlers."""
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
    threading.Thread(target=loop.run_forever, name="txmsg-loop", daemon=True).start()
    return loop


_loop = PerProcess(_started)
