"""The views of the shop: they place orders, and show the state of an order."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import (
    require_GET,
    require_http_methods,
    require_POST,
)
from payments.messages import Charge, charge_payment

from django_txmsg.flows import AlreadyResumed, FlowView, resume, start

from .flows import Checkout, PlaceOrder
from .forms import OrderForm
from .models import Approval, Order
from .trail import Hop, trail

#: What the customer calls the stages.
STEPS = {
    "payments.charge": "Paid",
    "shipping.ship": "Packed",
    "orders.shipped": "On its way",
}


@require_http_methods(["GET", "POST"])
def shop(request: HttpRequest) -> HttpResponse:
    """Show the form and the latest orders (GET), or place an order (POST).

    OutboxMiddleware has opened a transaction, so the order and its message are
    committed together.
    """
    form = OrderForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        order = form.save()
        charge_payment.send(
            Charge(order.number, order.total, form.cleaned_data["payment_fails"]),
            key=order.number,
            headers={"correlation-id": order.number},
        )
        return redirect("order", number=order.number)
    orders = Order.objects.all()[:12]
    return render(request, "orders/shop.html", {"form": form, "orders": orders})


@require_GET
def order(request: HttpRequest, number: str) -> HttpResponse:
    """Show an order and the states of its messages. The page reloads automatically."""
    found = get_object_or_404(Order, number=number)
    hops = trail(number)
    steps = [("Ordered", "processed"), *_steps(hops)]
    over = found.status == Order.Status.SHIPPED or any(hop.dead for hop in hops)
    facts = {"order": found, "hops": hops, "steps": steps, "over": over}
    return render(request, "orders/order.html", facts)


@require_GET
def order_json(request: HttpRequest, number: str) -> JsonResponse:
    """Return the data of the order's page as JSON."""
    found = get_object_or_404(Order, number=number)
    return JsonResponse(
        {
            "number": found.number,
            "item": found.item,
            "quantity": found.quantity,
            "status": found.status,
            "tracking_code": found.tracking_code,
            "hops": [hop.as_dict() for hop in trail(number)],
        }
    )


@require_POST
def checkout(request: HttpRequest) -> JsonResponse:
    """Place an order through the flow. The order and the run are committed together."""
    form = OrderForm(request.POST)
    if not form.is_valid():
        return JsonResponse({"errors": form.errors}, status=400)
    order = form.save()
    run = start(Checkout, PlaceOrder(order.number), key=order.number)
    return JsonResponse({"number": order.number, "run_id": str(run.run_id)})


@require_POST
def approve(request: HttpRequest, number: str) -> JsonResponse:
    """Approve an expensive order. In a real shop, this would be a page for the
    staff."""
    found = get_object_or_404(Approval, order=number)
    try:
        resume(found.token, True)
    except AlreadyResumed as error:
        return JsonResponse({"error": str(error)}, status=409)
    return JsonResponse({"number": number, "approved": True})


#: A run as JSON; `?wait=20` waits for its end.
run = FlowView.as_view(flow=Checkout)


def _steps(hops: list[Hop]) -> list[tuple[str, str]]:
    # A message that was sent again by an operator takes the place of the first.
    states = {hop.destination: hop.state for hop in hops}
    return [(word, states.get(name, "waiting")) for name, word in STEPS.items()]
