"""The views under test. They place an order with two messages, and fail in several
ways."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from asgiref.sync import sync_to_async
from django.contrib.admin.models import CHANGE, LogEntry
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, connection, transaction
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    JsonResponse,
    StreamingHttpResponse,
)
from django.urls import path

from django_txmsg import conf, no_outbox, outbox_session, send_message
from tests.app.models import Order


def orders() -> str:
    """Return the destination of the orders. The name of the service is a part of it.
    Brokers keep queues after a test, so a test on a real broker has a service name of
    its own."""
    return f"{conf.get().SERVICE}.orders"


def place(number: str) -> list[str]:
    """Store one order and its two messages, and return the messages' ids."""
    order = Order.objects.create(number=number)
    return [
        str(send_message(orders(), {"order": order.number, "part": part}).id)
        for part in ("pay", "ship")
    ]


def order(request: HttpRequest) -> HttpResponse:
    """Place an order. The query parameter `then` chooses how the request ends."""
    number = request.GET.get("number") or request.POST["number"]
    ids = place(number)
    ending = request.GET.get("then", "")
    if ending == "raise":
        raise RuntimeError("the view failed")
    if ending == "not_found":
        raise Http404
    if ending == "denied":
        raise PermissionDenied
    if ending == "roll_back":
        transaction.set_rollback(True)
    if ending == "swallow":
        with contextlib.suppress(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT nothing FROM nowhere")
    if ending == "swallow_save":
        with contextlib.suppress(DatabaseError):
            Order.objects.create(number=number)
    if ending == "bad_commit":
        # Its foreign key is checked at the commit.
        LogEntry.objects.create(user_id=987_654, action_flag=CHANGE, object_repr="x")
    if ending == "bad_hook":
        transaction.on_commit(_raise)
    if ending == "metadata":
        request.outbox_session.metadata["tenant"] = "north"
    status = int(ending) if ending.isdigit() else 201
    return JsonResponse({"number": number, "ids": ids}, status=status)


def rolled_back_part(request: HttpRequest) -> HttpResponse:
    """Place two orders. The savepoint of the first one is rolled back."""
    with contextlib.suppress(RuntimeError), transaction.atomic():
        place("lost")
        raise RuntimeError
    place("kept")
    return HttpResponse(status=201)


def read(request: HttpRequest) -> HttpResponse:
    """Send nothing."""
    return JsonResponse({"orders": Order.objects.count()})


def write(request: HttpRequest) -> HttpResponse:
    """Store an order and send nothing."""
    Order.objects.create(number=request.GET["number"])
    return HttpResponse(status=201)


@no_outbox
def without(request: HttpRequest) -> HttpResponse:
    """Return whether a transaction is open."""
    return JsonResponse({"atomic": connection.in_atomic_block})


@transaction.non_atomic_requests
def non_atomic(request: HttpRequest) -> HttpResponse:
    """Return whether a transaction is open."""
    return JsonResponse({"atomic": connection.in_atomic_block})


def atomic(request: HttpRequest) -> HttpResponse:
    """Return how many transactions and savepoints surround the view."""
    return JsonResponse({"depth": len(connection.atomic_blocks)})


async def in_async_view(request: HttpRequest) -> HttpResponse:
    """Send from an async view, which has no open transaction."""
    send_message(orders(), {})
    return HttpResponse()


async def in_async_view_right(request: HttpRequest) -> HttpResponse:
    """Send from an async view in the way that the error message recommends."""

    def work() -> None:
        with outbox_session():
            place("async")

    await sync_to_async(work)()
    return HttpResponse(status=201)


def stream(request: HttpRequest) -> HttpResponse:
    """Send from the response's generator, which runs after the transaction."""
    place("streamed")

    def lines() -> Iterator[str]:
        yield "first\n"
        send_message(orders(), {})

    return StreamingHttpResponse(lines(), status=201)


def _raise() -> None:
    raise RuntimeError("the hook failed")


urlpatterns = [
    path("order", order),
    path("rolled_back_part", rolled_back_part),
    path("read", read),
    path("write", write),
    path("without", without),
    path("non_atomic", non_atomic),
    path("atomic", atomic),
    path("async", in_async_view),
    path("async_right", in_async_view_right),
    path("stream", stream),
]
