"""The shop's pages, the admin, and what a load balancer asks."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("txmsg/", include("django_txmsg.urls")),
    path("", include("orders.urls")),
]
