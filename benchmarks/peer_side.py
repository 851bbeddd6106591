"""The part of the benchmark that runs in an environment with django-outbox-pattern.

`relay` stores PEER_COUNT messages of 300 bytes, and measures how long the publish
command takes until the last row is marked as sent. `consume` sends the same number of
messages to a queue, and measures how long the subscriber takes until its callback has
saved the last one. Both print messages per second.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import django
from django.conf import settings

database = urlsplit(os.environ["PEER_DATABASE"])
broker = urlsplit(os.environ["PEER_BROKER"])
COUNT = int(os.environ["PEER_COUNT"])

settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": database.path.lstrip("/"),
            "USER": database.username,
            "PASSWORD": database.password or "",
            "HOST": database.hostname,
            "PORT": database.port,
        }
    },
    INSTALLED_APPS=["django_outbox_pattern"],
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    SECRET_KEY="bench",
    USE_TZ=True,
    DJANGO_OUTBOX_PATTERN={
        "DEFAULT_STOMP_HOST_AND_PORTS": [(broker.hostname, broker.port)],
        "DEFAULT_STOMP_USERNAME": broker.username,
        "DEFAULT_STOMP_PASSCODE": broker.password,
        "DEFAULT_PUBLISHED_CHUNK_SIZE": 500,
    },
)
django.setup()

from django.core.management import call_command  # noqa: E402 - after setup()
from django.db import connection, transaction  # noqa: E402
from django_outbox_pattern.choices import StatusChoice  # noqa: E402
from django_outbox_pattern.factories import (  # noqa: E402
    factory_connection,
    factory_consumer,
)
from django_outbox_pattern.models import Published, Received  # noqa: E402

QUEUE = f"/queue/bench.peer.{os.getpid()}"
TEXT = "x" * 285


def relay() -> float:
    """Return the rate of the peer's publish command."""
    Published.objects.bulk_create(
        [Published(destination=QUEUE, body={"text": TEXT}) for _ in range(COUNT)],
        batch_size=1000,
    )
    began = time.perf_counter()
    threading.Thread(target=call_command, args=("publish",), daemon=True).start()
    while Published.objects.exclude(status=StatusChoice.SUCCEEDED).exists():
        time.sleep(0.02)
    return COUNT / (time.perf_counter() - began)


def consume() -> float:
    """Return the rate of the peer's subscriber. Its handler does the same as ours: it
    stores an inbox row, a business row and an outgoing message."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE IF NOT EXISTS effect (id bigserial, name text)")
    done, finished = 0, threading.Event()

    def callback(payload: Any) -> None:
        nonlocal done
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("INSERT INTO effect (name) VALUES ('placed')")
            Published.objects.create(destination="/queue/next", body={"text": TEXT})
            payload.save()
        done += 1
        if done == COUNT:
            finished.set()

    # It declares its queue with arguments of its own; a sender must leave it alone.
    factory_consumer().start(callback, QUEUE)
    sender = factory_connection()
    sender.connect(broker.username, broker.password, wait=True)
    began = time.perf_counter()
    for number in range(COUNT):
        sender.send(
            f"/amq{QUEUE}",
            json.dumps({"n": number, "text": TEXT}),
            headers={"persistent": "true", "dop-msg-id": f"{os.getpid()}-{number}"},
        )
    # It has been seen to stall; what it has done by then is its rate.
    finished.wait(60)
    return done / (time.perf_counter() - began)


call_command("migrate", verbosity=0)
Published.objects.all().delete()
Received.objects.all().delete()
print({"relay": relay, "consume": consume}[sys.argv[1]](), flush=True)
os._exit(0)
