"""Archives several logs at the same time, each until a given step. When all archives
have reached their steps, kills its own process group with SIGKILL, including the JVM.

The only argument is a JSON list of `{url, service, lake, step, nth}`. Some entries also
have `overlap`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from django_txmsg.spark.jobs.archive import Archiver
from django_txmsg.spark.schemas import OUTBOX
from django_txmsg.spark.session import build
from django_txmsg.spark.spec import LakeSpec, SourceSpec
from tests.spark.archives import OVERLAPPING, SMALL

#: Steps that come only where a row has changed while its batch was on the way.
DIFFERING = ("settled", "amending", "amended")


def main(plan: list[dict[str, Any]]) -> None:
    """Run all archives at the same time. Each one waits at its step. When all of them
    have reached their steps, kill the process group."""
    spark = build("kill", {"spark.master": "local[2]"})
    arrived = threading.Semaphore(0)

    def run(one: dict[str, Any]) -> None:
        source = SourceSpec(one["service"], one["url"])
        left = one.get("nth", 1)

        def on_step(step: str) -> None:
            nonlocal left
            if step == one["step"]:
                left -= 1
                if left == 0:
                    arrived.release()
                    threading.Event().wait()

        def change(step: str) -> None:
            if one["step"] in DIFFERING and step == "committed":
                requeue(source)
            on_step(step)

        # Without Spark the steps are the same, and so is what is left of them.
        engine = spark if source.vendor == "postgresql" else None
        options = OVERLAPPING if one.get("overlap") else SMALL
        Archiver(
            engine, source, LakeSpec(one["lake"]), OUTBOX, options, on_step=change
        ).run()
        raise SystemExit(f"{one['step']} never came")

    for one in plan:
        threading.Thread(target=run, args=(one,), daemon=True).start()
    for _ in plan:
        if not arrived.acquire(timeout=240):
            sys.exit("not every archive has reached its step")
    os.killpg(0, signal.SIGKILL)


def requeue(source: SourceSpec) -> None:
    """Make a row of the first batch pending again, like an operator who uses SQL."""
    from django_txmsg.spark.connection import connect_plain

    connection = connect_plain(source)
    connection.execute(
        "UPDATE django_txmsg_outboxmessage SET dispatched_at = NULL WHERE id = 7"
    )
    connection.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
