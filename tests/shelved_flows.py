"""Flows of the tests. Each is declared once, but registered only while a test uses
it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from django_txmsg import stages, wire
from django_txmsg.flows import declaration
from django_txmsg.flows.batches import Batches
from tests.forgetting import forget_flow

Shelved = TypeVar("Shelved", bound=type[Any])

_stages: dict[type[Any], list[stages.Stage]] = {}


def shelved(flow: Shelved) -> Shelved:
    """Unregister a flow that was just declared. `at_hand()` registers it again."""
    name = flow._declaration.name
    of_it = (name, name + wire.STEPS)
    _stages[flow] = [one for one in stages.all_stages() if one.name in of_it]
    _withdraw(name)
    return flow


@contextmanager
def at_hand(*flows: type[Any]) -> Iterator[None]:
    """Register these flows until the end of the block."""
    for flow in flows:
        declaration.declare(flow._declaration)
        for stage in _stages[flow]:
            stages.register(stage)
    try:
        yield
    finally:
        for flow in flows:
            _withdraw(flow._declaration.name)


def _withdraw(name: str) -> None:
    forget_flow(name)
    for address in (name, name + wire.STEPS):
        stages.unregister(address)


# Declared by the import, in whichever test that happens.
shelved(Batches)
