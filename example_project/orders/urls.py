"""The shop's three pages."""

from __future__ import annotations

from django.urls import path

from . import views

urlpatterns = [
    path("", views.shop, name="shop"),
    path("orders/<str:number>/", views.order, name="order"),
    path("orders/<str:number>.json", views.order_json, name="order-json"),
]
