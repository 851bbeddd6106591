"""Reads the headers in which RabbitMQ records why it has dead-lettered a message."""

from __future__ import annotations

import json
from collections.abc import Mapping

from .. import wire


def cause(headers: Mapping[str, str]) -> tuple[str, str]:
    """Return why RabbitMQ dead-lettered a message, and from which queue. Either is ""
    if the headers do not contain it.

    The first death counts, because an operator's dead-letter queues may form a chain.
    But RabbitMQ records the end of a delay as a death, too. If that is the first death,
    the oldest other death counts. STOMP omits the list of all deaths: then the last
    death counts.
    """
    reason = headers.get("x-first-death-reason", "")
    queue = headers.get("x-first-death-queue", "")
    if not _ends_delay(reason, queue):
        return reason, queue
    # The list begins with the newest death.
    deaths = _deaths(headers)
    for death in reversed(deaths):
        if not _ends_delay(*death):
            return death
    if "x-last-death-queue" in headers:
        return headers.get("x-last-death-reason", ""), headers["x-last-death-queue"]
    # RabbitMQ before 3.13 has no headers for the last death.
    return deaths[0] if deaths else ("", queue.rpartition(".")[0])


def _ends_delay(reason: str, queue: str) -> bool:
    return reason == "expired" and wire.is_delay_queue(queue)


def _deaths(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    try:
        found = json.loads(headers["x-death"])
        return [(str(one["reason"]), str(one["queue"])) for one in found]
    except (LookupError, TypeError, ValueError, RecursionError):
        return []
