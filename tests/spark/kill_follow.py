"""Follows several logs, each in a child process that is killed at a given step.

The only argument is a JSON list of `{url, service, lake, step, nth, webhook}`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from django_txmsg.spark.cli import parsed
from django_txmsg.spark.jobs.follow import Follower
from django_txmsg.spark.spec import JobSpec, LakeSpec, SourceSpec
from django_txmsg.webhook import Webhook
from tests.spark.kill_archive import DIFFERING, requeue

#: Of tests: nothing but the outbox, in small batches, without a JVM.
OPTIONS = parsed(
    ["follow", "--table", "outbox", "--older-than", "1d", "--every", "0.1s",
     "--batch-rows", "100", "--reconcile-every", "0s", "--verify-every", "0s",
     "--sweep-every", "0s"]
)  # fmt: skip


class Telling(Webhook):
    """A webhook that kills its own process after the server has accepted an alert, and
    before the acceptance is recorded."""

    def post(self, message: Any, stop: threading.Event) -> bool:
        assert super().post(message, stop)
        os.kill(os.getpid(), signal.SIGKILL)
        return True


def follow(one: dict[str, Any]) -> None:
    """Run `follow` on one log. Kill this process when `follow` reaches the given step
    for the `nth` time."""
    source = SourceSpec(one["service"], one["url"])
    left = one.get("nth", 1)

    def on_step(step: str) -> None:
        nonlocal left
        if one["step"] in DIFFERING and step == "committed":
            requeue(source)
        if step == one["step"]:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    webhook = Telling(one["webhook"]) if one.get("webhook") else None
    spec = JobSpec((source,), LakeSpec(one["lake"]))
    Follower(spec, OPTIONS, webhook, threading.Event(), on_step=on_step).work()


def main(plan: list[dict[str, Any]]) -> None:
    """Start the children. Exit with 0 if each of them was killed."""
    children = []
    for one in plan:
        child = os.fork()
        if not child:
            signal.alarm(120)
            follow(one)
            os._exit(1)
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    killed = [os.WIFSIGNALED(one) and os.WTERMSIG(one) == 9 for one in ends]
    sys.exit(None if all(killed) else f"not killed: {ends}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
