"""Whether messaging moves, for load balancers and uptime checks: one cheap look.

It tells ages and never contents. `late` after 2 minutes, `degraded` after 10 and
`stuck` after 30; only `stuck`, or a database that does not answer, is a 503.
"""

from __future__ import annotations

import datetime as dt

from django.db import DatabaseError, InterfaceError, connections, router
from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from .models import OutboxMessage
from .models.fields import now_sql, read_instant

#: What is said from which age of the oldest due message on.
THRESHOLDS = (
    ("stuck", dt.timedelta(minutes=30)),
    ("degraded", dt.timedelta(minutes=10)),
    ("late", dt.timedelta(minutes=2)),
)

_OLDEST = """
    SELECT {now},
      (SELECT due_at FROM django_txmsg_outboxmessage
       WHERE dispatched_at IS NULL AND dead_at IS NULL ORDER BY due_at, id LIMIT 1),
      (SELECT MIN(due_at) FROM django_txmsg_inboxmessage WHERE due_at IS NOT NULL)
"""


@require_safe
@never_cache
def health(request: HttpRequest) -> JsonResponse:
    """Answer how long the oldest due message has been waiting.

    `?fail=late` or `?fail=degraded` answers 503 from that state on already.
    """
    try:
        ages = oldest_ages(router.db_for_read(OutboxMessage))
    except (DatabaseError, InterfaceError):
        return JsonResponse({"status": "no database"}, status=503)
    state = state_of(max(ages.values()))
    failing = {"stuck"}
    if request.GET.get("fail") in ("late", "degraded"):
        failing.add("degraded")
    if request.GET.get("fail") == "late":
        failing.add("late")
    return JsonResponse(
        {
            "status": state,
            "oldest": {
                name: round(age.total_seconds(), 1) for name, age in ages.items()
            },
        },
        status=503 if state in failing else 200,
    )


def oldest_ages(using: str) -> dict[str, dt.timedelta]:
    """Return how long the oldest due messages of outbox and inbox have been due."""
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute(_OLDEST.format(now=now_sql(connection)), [])
        now, *oldest = (read_instant(value) for value in cursor.fetchone())
    assert now is not None
    return {
        name: max(now - due, dt.timedelta()) if due else dt.timedelta()
        for name, due in zip(("outbox", "redelivery"), oldest, strict=True)
    }


def state_of(age: dt.timedelta) -> str:
    """Return the word for a lag: ok, late, degraded or stuck."""
    for name, threshold in THRESHOLDS:
        if age >= threshold:
            return name
    return "ok"
