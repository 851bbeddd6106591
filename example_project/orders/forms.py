"""The order form. A checkbox makes the payment fail."""

from __future__ import annotations

from django import forms

from .models import PRICES, Order


class OrderForm(forms.ModelForm):
    """The form in which a customer enters an order."""

    item = forms.ChoiceField(
        choices=[(name, f"{name}, {price} €") for name, price in PRICES.items()]
    )
    quantity = forms.IntegerField(min_value=1, max_value=99, initial=1)
    payment_fails = forms.BooleanField(
        required=False, label="Let the payment fail, on purpose"
    )

    class Meta:
        model = Order
        fields = ["item", "quantity"]

    def save(self, commit: bool = True) -> Order:
        """Store the order with its price."""
        order: Order = self.instance
        order.total = PRICES[order.item] * order.quantity
        super().save(commit)
        return order
