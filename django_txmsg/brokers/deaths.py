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
    the last death counts.
    """
    reason = headers.get("x-first-death-reason", "")
    queue = headers.get("x-first-death-queue", "")
    if reason != "expired" or not wire.is_delay_queue(queue):
        return reason, queue
    if "x-last-death-queue" in headers:
        return headers.get("x-last-death-reason", ""), headers["x-last-death-queue"]
    # RabbitMQ before 3.13 records the last death only in a list, which STOMP omits.
    try:
        newest = json.loads(headers["x-death"])[0]
        return str(newest["reason"]), str(newest["queue"])
    except (LookupError, TypeError, ValueError, RecursionError):
        return "", queue.rpartition(".")[0]
