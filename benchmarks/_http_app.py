"""The view for `benchmarks.http_outbox`. An environment variable chooses how it stores
and sends."""

from __future__ import annotations

import json
import os
import threading
import uuid
from typing import Any

import environ
from django.conf import settings

KIND = os.environ["TXMSG_BENCH_KIND"]
BROKER = os.environ["TXMSG_BENCH_BROKER"]
BODY = {"order": "A-1", "text": "x" * 270}

database: dict[str, Any] = environ.Env.db_url_config(os.environ["TXMSG_BENCH_DATABASE"])
database["CONN_MAX_AGE"] = None
database["ATOMIC_REQUESTS"] = KIND in ("atomic", "direct", "hand", "rows")
settings.configure(
    ALLOWED_HOSTS=["*"],
    DATABASES={"default": database},
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    INSTALLED_APPS=[
        "django.contrib.contenttypes",
        "django.contrib.auth",
        "django.contrib.messages",
        "django.contrib.sessions",
        "django_txmsg",
        "tests.app",
    ],
    MIDDLEWARE=[
        # As `startproject` writes it, but for the check of forms.
        "django.middleware.security.SecurityMiddleware",
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.middleware.common.CommonMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django.contrib.messages.middleware.MessageMiddleware",
        "django.middleware.clickjacking.XFrameOptionsMiddleware",
        *["django_txmsg.middleware.OutboxMiddleware"] * (KIND in ("outbox", "bulk")),
    ],
    ROOT_URLCONF=__name__,
    SECRET_KEY="bench",
    TXMSG={"SERVICE": "bench", "BROKERS": {"default": {"URL": BROKER}}},
    USE_TZ=True,
)

from django.core.wsgi import get_wsgi_application  # noqa: E402
from django.http import HttpRequest, HttpResponse  # noqa: E402
from django.urls import path  # noqa: E402

application = get_wsgi_application()

from django_txmsg import send_message, send_messages  # noqa: E402
from tests.app.models import Order  # noqa: E402

_local = threading.local()


def place(request: HttpRequest) -> HttpResponse:
    """Store one row. Then do what the measured contender does in addition:

    - "outbox", "bulk": store two messages in the outbox.
    - "direct": send two messages with stomp.py.
    - "rows": store two more rows.
    - "hand": store two more rows, and send one message with stomp.py.
    - "atomic": nothing.
    """
    Order.objects.create(number=request.GET["number"])
    sends = KIND in ("outbox", "direct")
    for destination in ("bench.pay", "bench.ship") if sends else ():
        if KIND == "outbox":
            send_message(destination, BODY)
        else:
            send_directly(destination)
    if KIND == "bulk":
        send_messages(
            {"destination": destination, "body": BODY}
            for destination in ("bench.pay", "bench.ship")
        )
    if KIND in ("hand", "rows"):
        rows = [Order(number=uuid.uuid4().hex, note="x" * 400) for _ in range(2)]
        Order.objects.bulk_create(rows)
    if KIND == "hand":
        send_directly("bench.control")
    return HttpResponse(status=201)


def send_directly(destination: str) -> None:
    """Send a message with stomp.py, and wait for its receipt."""
    import stomp
    from stomp.listener import WaitingListener

    if not hasattr(_local, "connection"):
        from django_txmsg import jms

        factory = jms.ConnectionFactory(BROKER)
        connection = stomp.Connection12(factory.addresses)
        connection.connect(factory.options.user, factory.options.password, wait=True)
        _local.connection, _local.number = connection, 0
    _local.number += 1
    receipt = f"r{_local.number}"
    listener = WaitingListener(receipt)
    _local.connection.set_listener("receipt", listener)
    _local.connection.send(
        f"/queue/{destination}",
        json.dumps(BODY),
        headers={"receipt": receipt, "persistent": "true"},
    )
    listener.wait_on_receipt()


urlpatterns = [path("place", place)]
