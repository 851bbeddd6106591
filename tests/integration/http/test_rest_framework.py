"""Views of Django REST framework behind the middleware, as the how-to shows them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connection
from django.test import Client, override_settings
from django.urls import include, path
from rest_framework import routers, serializers, viewsets
from rest_framework.response import Response
from rest_framework.views import APIView

from django_txmsg import no_outbox, send_message
from django_txmsg.models import OutboxMessage
from tests.app.models import Order
from tests.integration.http.conftest import nothing_happened
from tests.running import committing

pytestmark = committing


class OrderSerializer(serializers.ModelSerializer):
    class Meta:
        model = Order
        fields = ["number", "total"]


class OrderViewSet(viewsets.ModelViewSet):
    queryset = Order.objects.all()
    serializer_class = OrderSerializer
    authentication_classes = ()
    permission_classes = ()

    def perform_create(self, serializer: serializers.ModelSerializer) -> None:
        order = serializer.save()
        send_message("payments.charge", {"order": order.number})
        if order.total > 500:
            raise serializers.ValidationError("more than the card allows")


class Ping(APIView):
    authentication_classes = ()
    permission_classes = ()

    def get(self, request: object) -> Response:
        return Response({"session": hasattr(request, "outbox_session")})


router = routers.SimpleRouter()
router.register("orders", OrderViewSet)
urlpatterns = [
    path("", include(router.urls)),
    path("ping/", Ping.as_view()),
    path("alone/", no_outbox(Ping.as_view())),
]


@pytest.fixture(autouse=True)
def _served(web) -> Iterator[None]:
    with override_settings(ROOT_URLCONF=__name__):
        yield


@pytest.fixture
def _atomic_requests() -> Iterator[None]:
    connection.settings_dict["ATOMIC_REQUESTS"] = True
    yield
    connection.settings_dict["ATOMIC_REQUESTS"] = False


def order(client: Client, number: str, total: int = 1, **headers: str) -> int:
    body = {"number": number, "total": total}
    response = client.post("/orders/", body, "application/json", headers=headers)
    return response.status_code


def test_what_a_viewset_creates_and_sends_is_stored_together(client: Client) -> None:
    assert order(client, "A-1") == 201

    assert Order.objects.get().number == "A-1"
    assert OutboxMessage.objects.get().destination == "payments.charge"


def test_late_validation_error_rolls_back_with_the_setting(client: Client, web) -> None:
    with web(ROLLBACK_ON_4XX=True), override_settings(ROOT_URLCONF=__name__):
        assert order(client, "A-1", 900) == 400
    assert nothing_happened()
    # Told nothing, the middleware commits what a response of 400 has done.
    assert order(client, "A-1", 900) == 400
    assert Order.objects.count() == 1


@pytest.mark.usefixtures("_atomic_requests")
def test_with_atomic_requests_the_framework_rolls_back_itself(client: Client) -> None:
    assert order(client, "A-1", 900) == 400
    assert nothing_happened()
    assert order(client, "A-2") == 201
    assert Order.objects.count() == OutboxMessage.objects.count() == 1


def test_a_token_in_the_authorization_header_is_a_caller(client: Client, web) -> None:
    key = {"Idempotency-Key": "k-1"}
    with web(IDEMPOTENCY=True), override_settings(ROOT_URLCONF=__name__):
        assert order(client, "A-1", **key) == 400  # nobody in particular
        mine = key | {"Authorization": "Token abc"}
        assert [order(client, "A-1", **mine) for _ in range(2)] == [201, 201]
    assert Order.objects.count() == 1


def test_a_view_can_be_left_alone(client: Client) -> None:
    assert client.get("/ping/").json() == {"session": True}
    assert client.get("/alone/").json() == {"session": False}
