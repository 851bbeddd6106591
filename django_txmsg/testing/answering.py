"""For tests of flows: answers in place of a stage that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from .. import stages
from ..sending.destination import Destination

Body = TypeVar("Body")
Reply = TypeVar("Reply")


@contextmanager
def answers(
    destination: Destination[Body, Reply], reply: Reply | Exception
) -> Iterator[list[Body]]:
    """Answer each request to a destination with `reply` for the duration of the block,
    in place of its stage, or raise it if it is an exception. Yields a list of the
    requests that came. For `drain()` inside the block."""
    real = [one for one in stages.all_stages() if one.destination == destination.name]
    for one in real:
        stages.unregister(one.name)
    came: list[Body] = []

    def answer(body: Any) -> Any:
        came.append(body)
        if isinstance(reply, Exception):
            raise reply
        return reply

    answer.__annotations__["body"] = destination.body
    stages.stage(destination)(answer)
    try:
        yield came
    finally:
        stages.unregister(destination.name)
        for one in real:
            stages.register(one)
