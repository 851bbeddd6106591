"""The shop's pages."""

from __future__ import annotations

from django.urls import path

from . import views

urlpatterns = [
    path("", views.shop, name="shop"),
    path("checkout/", views.checkout, name="checkout"),
    path("runs/<uuid:run_id>/", views.run, name="run"),
    path("orders/<str:number>/approve/", views.approve, name="approve"),
    path("orders/<str:number>/", views.order, name="order"),
    path("orders/<str:number>.json", views.order_json, name="order-json"),
]
