"""The flow of a checkout: payment, reservation of the goods, and approval of expensive
orders by a person."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal

from payments.messages import Take, Taken, refund_payment, take_payment
from shipping.messages import Reserve, Reserved, release_goods, reserve_goods

from django_txmsg import message_type
from django_txmsg.flows import Dead, Flow, Next, TimedOut, step

from .models import Approval, Order

#: Above this sum a person decides.
APPROVED_UP_TO = Decimal(200)


@message_type("orders.Checkout")
@dataclass
class PlaceOrder:
    """Check an order out."""

    order: str


@message_type("orders.Accepted")
@dataclass
class Accepted:
    """The order is paid, and its goods are reserved."""

    order: str
    shelf: str


@message_type("orders.Refused")
@dataclass
class Refused:
    """The order is refused. Its payment and its reservation were undone."""

    order: str
    why: str


Answer = Accepted | Refused


class Checkout(
    Flow[PlaceOrder, Answer], name="orders.checkout", within=timedelta(minutes=5)
):
    """The flow of an order. Each step is one transaction. Between two steps, no process
    waits."""

    order: str = ""
    shelf: str = ""

    @step
    def start(self, asked: PlaceOrder) -> Next[Answer]:
        """Request the payment. If the flow fails, the payment is refunded."""
        self.order = asked.order
        order = Order.objects.get(number=self.order)
        return self.ask(
            take_payment,
            Take(order.number, order.total),
            then=self.paid,
            undo=refund_payment,
        )

    @step
    def paid(self, taken: Taken) -> Next[Answer]:
        """Request the reservation of the goods."""
        order = Order.objects.get(number=self.order)
        return self.ask(
            reserve_goods,
            Reserve(order.number, order.item, order.quantity),
            then=self.reserved,
            undo=release_goods,
        )

    @step
    def reserved(self, kept: Reserved) -> Next[Answer]:
        """Accept a cheap order. For an expensive one, wait up to two days for a
        person's approval."""
        self.shelf = kept.shelf
        if Order.objects.get(number=self.order).total <= APPROVED_UP_TO:
            return self.approved(True)
        waits = self.wait(
            then=self.approved, within=timedelta(days=2), otherwise=self.expired
        )
        # If the flow goes back to this step, the row of its first call still exists.
        Approval.objects.update_or_create(
            order=self.order, defaults={"token": waits.token}
        )
        return waits

    @step
    def approved(self, yes: bool) -> Next[Answer]:
        """End the flow: accept the order, or refuse it."""
        if not yes:
            return self._refused("a person has refused it")
        self._close(Order.Status.ACCEPTED)
        return Accepted(self.order, self.shelf)

    @step
    def expired(self, why: TimedOut | Dead) -> Next[Answer]:
        """Refuse the order, because nobody has approved it."""
        return self._refused("nobody has approved it")

    def _refused(self, why: str) -> Next[Answer]:
        self._close(Order.Status.REFUSED)
        return self.fail(Refused(self.order, why))

    def _close(self, status: Order.Status) -> None:
        Order.objects.filter(number=self.order).update(status=status)
        Approval.objects.filter(order=self.order).delete()
