"""Measures how long operators wait for each admin page and command, with full tables.

    python -m benchmarks.admin_pages [--outbox N] [--inbox N] [--dead N] [--rounds N]

Fills a PostgreSQL database (one that it starts, or the one of BENCH_DATABASE_URL).
Requests each page repeatedly as a logged-in operator, and runs each command in a
separate process. Prints the 50th and 95th percentiles, and the memory that each command
adds. Then it redelivers 100,000 dead letters and prints the rate (not with `--pages`).

It fails if a page or command takes more than 400 ms, if a command adds more than 64
MiB, or if the rate is below 5,000 messages a second.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import resource
import sys
import threading
import time
import uuid
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PAGE_LIMIT, RATE_LIMIT, REDELIVERED = 0.400, 5_000, 100_000
#: MiB that a command may add to its process.
MEMORY_LIMIT = 64

BODY = """convert_to(
    '{"order": ' || i || ', "note": "' || repeat('x', 250) || '"}', 'UTF8')"""

#: A day of messages to forty destinations, one of which is hardly used; a thousand
#: pending, and a hundred of those overdue.
FILL_OUTBOX = f"""
    INSERT INTO django_txmsg_outboxmessage (message_id, replay_id, broker, destination,
        key, correlation_id, headers, content_type, body, attempts, last_error,
        created_at, due_at, dispatched_at)
    SELECT gen_random_uuid(), '', 'default',
        CASE WHEN i %% 100000 = 7 THEN 'rare.place' ELSE 'place.' || i %% 40 END,
        CASE WHEN i %% 10 = 0 THEN 'customer-' || i %% 5000 ELSE '' END,
        'flow-' || i / 4, '{{"tenant": "north"}}', 'application/json', {BODY}, 0, '',
        at, at, CASE WHEN i <= %s - 1000 THEN at + interval '40 ms' END
    FROM (SELECT i, now() - interval '24 hours' * (1 - i / %s::float) AS at
          FROM generate_series(1, %s) AS i) AS day
"""
FILL_INBOX = """
    INSERT INTO django_txmsg_inboxmessage (stage, message_id, destination,
        correlation_id, service, created_at, deliveries, attempts, first_received_at,
        last_received_at, started_at, processed_at, last_error, due_at, headers, body)
    SELECT 'stage.' || i %% 40, gen_random_uuid(), 'place.' || i %% 40,
        'flow-' || i / 4, 'shop', at, 1, 1, at, at, at,
        CASE WHEN i <= %s - 1000 THEN at + interval '12 ms' END, '',
        CASE WHEN i > %s - 1000 THEN now() + interval '1 minute' END,
        CASE WHEN i > %s - 1000 THEN '{}'::jsonb END,
        CASE WHEN i > %s - 1000 THEN '{}'::bytea END
    FROM (SELECT i, now() - interval '24 hours' * (1 - i / %s::float) AS at
          FROM generate_series(1, %s) AS i) AS day
"""
FILL_DEAD = f"""
    INSERT INTO django_txmsg_deadletter (message_id, stage, broker, destination,
        correlation_id, headers, content_type, body, reason, exception, traceback,
        fingerprint, attempts, deaths, message_created_at, created_at, resolution,
        resolved_by)
    SELECT gen_random_uuid(), 'stage.' || i %% 10, 'default', 'place.' || i %% 10, '',
        jsonb_build_object('txmsg-id', gen_random_uuid(), 'tenant', 'north',
            'content-type', 'application/json', 'txmsg-service', 'shop'),
        'application/json', {BODY}, 'attempts_exhausted',
        'shop.errors.OutOfStock: no stock of article ' || i %% 50,
        repeat('  File "stages.py", line 7, in reserve' || chr(10), 20),
        lpad((i %% 50)::text, 16, '0'), 7, 1 + (i %% 20 = 0)::int, at, at, 'open', ''
    FROM (SELECT i, now() - interval '20 hours' * (1 - i / %s::float) AS at
          FROM generate_series(1, %s) AS i) AS day
"""


def fill(outbox: int, inbox: int, dead: int) -> None:
    """Fill the tables. Then vacuum and analyze them, like autovacuum."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(FILL_OUTBOX, [outbox] * 3)
        cursor.execute(FILL_INBOX, [inbox] * 6)
        cursor.execute(FILL_DEAD, [dead] * 2)
        for name in ("outboxmessage", "inboxmessage", "deadletter"):
            cursor.execute(f"VACUUM ANALYZE django_txmsg_{name}")


def pages() -> dict[str, str]:
    """Return a dict with the URLs of all pages. The keys are the pages' names."""
    from django.utils import timezone

    from django_txmsg.dead_letters import bulk
    from django_txmsg.models import DeadLetter, OutboxMessage

    outbox = "/admin/django_txmsg/outboxmessage/"
    inbox = "/admin/django_txmsg/inboxmessage/"
    dead = "/admin/django_txmsg/deadletter/"
    stored = OutboxMessage.objects.count()
    hour_ago = f"{timezone.localtime() - dt.timedelta(hours=1):%Y-%m-%dT%H:%M}"
    day = f"{OutboxMessage.objects.order_by('-pk')[0].created_at:%Y-%m-%d}"
    middle = OutboxMessage.objects.order_by("pk")[stored // 2]
    letter = DeadLetter.objects.order_by("pk")[1000]
    operation = bulk.finish(bulk.start("discard", {"ids": [letter.pk]}))
    return {
        "(Django's own index, for scale)": "/admin/",
        "overview": "/admin/django_txmsg/",
        "outbox": outbox,
        "outbox, pending": f"{outbox}?state=pending",
        "outbox, dispatched": f"{outbox}?state=dispatched",
        "outbox, one destination": f"{outbox}?destination=place.7",
        "outbox, a rare destination": f"{outbox}?destination=rare.place",
        "outbox, last hour": f"{outbox}?since={hour_ago}",
        "outbox, a late page": f"{outbox}?p={min(19, stored // 100)}",
        "outbox, search by message id": f"{outbox}?q={middle.message_id}",
        "outbox, search by flow": f"{outbox}?q=flow-4711",
        "outbox, search by key": f"{outbox}?q=customer-4710",
        "outbox, search for nothing": f"{outbox}?q={uuid.uuid4()}",
        "inbox": inbox,
        "inbox, redelivering": f"{inbox}?state=redelivering",
        "inbox, dead": f"{inbox}?state=dead",
        "inbox, one stage": f"{inbox}?stage=stage.7",
        "inbox, search by flow": f"{inbox}?q=flow-4711",
        "message": f"{outbox}{middle.message_id}/",
        "message, dead": f"{outbox}{letter.message_id}/",
        "dead letters by error": dead,
        "dead letters, list": f"{dead}?resolution=open",
        "dead letters, one stage": f"{dead}?stage=stage.3&resolution=open",
        "dead letters, failed again": f"{dead}?again=1",
        "dead letters, search": f"{dead}?q={letter.message_id}",
        "confirmation, one error": f"{dead}confirm/?kind=redeliver&fingerprint={7:016}",
        "confirmation, all": f"{dead}confirm/?kind=redeliver",
        "bulk operations": "/admin/django_txmsg/bulkoperation/",
        "a bulk operation": f"/admin/django_txmsg/bulkoperation/{operation.pk}/change/",
        "outbox, older": f"{outbox}?older={middle.pk}",
        "outbox, between two times": f"{outbox}?since={day}&before={day}T06:00",
        "inbox, older": f"{inbox}?older={middle.pk}",
        "inbox, between two times": f"{inbox}?since={day}&before={day}T06:00",
        "dead letters, older": f"{dead}?resolution=open&older={letter.pk}",
        "dead letters, between": f"{dead}?since={day}&before={day}T06:00",
        "dead letters, search for nothing": f"{dead}?q=nothing",
        "dead letters, search by key": f"{dead}?q=customer-4710",
        "dead letters, one error": f"{dead}?fingerprint={7:016}",
        "confirmation, search": f"{dead}confirm/?kind=redeliver&search=nothing",
        "flows": "/admin/django_txmsg/run/",
        "recurring": "/admin/django_txmsg/schedule/",
        "alerts": "/admin/django_txmsg/alert/",
        "audit": "/admin/django_txmsg/auditentry/",
        "what changed": "/admin/django_txmsg/auditentry/changes/",
        "stages": "/admin/django_txmsg/stagestate/",
        "workers": "/admin/django_txmsg/worker/",
        "health": "/txmsg/health/",
        "metrics": "/txmsg/metrics/",
    }


def commands() -> list[list[str]]:
    """Return the commands to measure. None of them changes data."""
    from django_txmsg.models import DeadLetter

    letter = DeadLetter.objects.order_by("pk")[1000]
    return [
        ["message_status"],
        ["message_status", "--json"],
        ["dead_letters", "list", "--limit", "20"],
        ["dead_letters", "list", "--stage", "stage.3", "--limit", "20", "--json"],
        ["dead_letters", "groups"],
        ["dead_letters", "show", str(letter.message_id)],
        ["dead_letters", "redeliver", "--all", "--dry-run"],
        ["order", "list"],
        ["prune_messages", "--dry-run"],
        ["subscriptions", "list"],
        ["txmsg", "audit"],
        ["txmsg", "bulk", "list"],
        ["txmsg", "flows", "list"],
        ["txmsg", "rate", "list"],
        ["txmsg", "schedule", "list"],
        ["txmsg", "stages", "list"],
    ]


def run_command(words: list[str]) -> tuple[float, float]:
    """Run a command in a forked process. Returns the seconds that the command took, and
    the MiB of memory that it added."""
    from django.core.management import call_command
    from django.db import connections

    connections.close_all()
    reading, writing = os.pipe()
    if os.fork() == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        with contextlib.suppress(SystemExit):  # something is overdue or dead
            call_command(*words, stdout=StringIO(), stderr=StringIO())
        taken = time.perf_counter() - began
        added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(writing, json.dumps([taken, added / 1024]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.wait()
    assert said, f"{words} failed"
    taken, added = json.loads(said)
    return taken, added


def measure(ask: Callable[[], Any], rounds: int) -> list[float]:
    """Return the duration of each round in seconds, shortest first."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        ask()
        taken.append(time.perf_counter() - began)
    return sorted(taken)


def redelivery_rate(count: int) -> float:
    """Redeliver `count` dead letters as `manage.py consume` does. Returns the rate."""
    from django_txmsg.dead_letters import bulk
    from django_txmsg.models import DeadLetter, OutboxMessage

    stored = OutboxMessage.objects.count()
    last = DeadLetter.objects.filter(resolution="open").order_by("pk")[count - 1].pk
    operation = bulk.start("redeliver", {})
    operation.up_to = last
    operation.save(update_fields=["up_to"])
    began = time.perf_counter()
    worked = bulk.work_off("default", threading.Event())
    taken = time.perf_counter() - began
    assert worked == count, (worked, count)
    assert OutboxMessage.objects.count() - stored == count
    return count / taken


def main() -> int:
    """Fill the tables, load the pages, redeliver, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outbox", type=int, default=1_000_000)
    parser.add_argument("--inbox", type=int, default=1_000_000)
    parser.add_argument("--dead", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--pages", action="store_true", help="redeliver nothing")
    given = parser.parse_args()

    from tests import services

    url = os.environ.get("BENCH_DATABASE_URL") or services.shared(
        services.PostgreSQL
    ).create_database("admin_pages")
    os.environ["TXMSG_TEST_DATABASE_URL"] = url
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    import django
    import environ

    django.setup()
    from django.conf import settings
    from django.core.management import call_command
    from django.db import connection

    connection.settings_dict["NAME"] = environ.Env.db_url_config(url)["NAME"]
    settings.TXMSG["DISPATCH_ON_COMMIT"] = "off"
    call_command("migrate", verbosity=0)
    from django.contrib.auth.models import User
    from django.test import Client

    from django_txmsg.models import OutboxMessage

    if not OutboxMessage.objects.exists():
        fill(given.outbox, given.inbox, given.dead)
    user, _ = User.objects.get_or_create(
        username="bench", is_staff=True, is_superuser=True
    )
    client = Client()
    client.force_login(user)

    slow = measure_pages(client, given.rounds) + measure_commands(given.rounds)
    if given.pages:
        return _verdict(slow, None)
    count = min(REDELIVERED, given.dead // 2)
    rate = redelivery_rate(count)
    print(f"\nRedelivering {count:,} dead letters: {rate:,.0f} a second")
    return _verdict(slow, rate)


def measure_pages(client: Any, rounds: int) -> list[str]:
    """Print the times of each page. Returns the pages that are too slow."""
    slow = []
    print(f"\nFirst byte, {rounds} rounds (milliseconds)")
    print(f"{'page':34} {'first':>8} {'p50':>8} {'p95':>8}")
    for name, address in pages().items():

        def ask(address: str = address) -> None:
            response = client.get(address)
            assert response.status_code in (200, 302, 503), (
                address,
                response.status_code,
            )

        first = measure(ask, 1)[0]
        taken = measure(ask, rounds)
        p50, p95 = (taken[int(share * (len(taken) - 1))] for share in (0.5, 0.95))
        print(f"{name:34} {first * 1e3:8.0f} {p50 * 1e3:8.0f} {p95 * 1e3:8.0f}")
        if p95 > PAGE_LIMIT:
            slow.append(name)
    return slow


def measure_commands(rounds: int) -> list[str]:
    """Print the time and the memory of each command. Returns the commands that exceed a
    limit."""
    slow = []
    print(f"\n{'command':50} {'p50':>8} {'p95':>8} {'MiB':>6}")
    for words in commands():
        found = [run_command(words) for _ in range(rounds)]
        taken, added = sorted(one for one, _ in found), max(more for _, more in found)
        p50, p95 = (taken[int(share * (len(taken) - 1))] for share in (0.5, 0.95))
        name = " ".join(words)
        print(f"{name:50} {p50 * 1e3:8.0f} {p95 * 1e3:8.0f} {added:6.0f}")
        if p95 > PAGE_LIMIT or added > MEMORY_LIMIT:
            slow.append(name)
    return slow


def _verdict(slow: list[str], rate: float | None) -> int:
    if slow:
        print(f"Above {PAGE_LIMIT * 1e3:.0f} ms or {MEMORY_LIMIT} MiB: "
              f"{', '.join(slow)}")  # fmt: skip
    late = rate is not None and rate < RATE_LIMIT
    if late:
        print(f"Redelivery is slower than {RATE_LIMIT:,} a second")
    return 1 if slow or late else 0


if __name__ == "__main__":
    raise SystemExit(main())
