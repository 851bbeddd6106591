"""The shop's pages, the admin, and the package's views for a load balancer and
Prometheus."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    # /txmsg/metrics/ needs no login: in production, let only Prometheus reach it.
    path("txmsg/", include("django_txmsg.urls")),
    path("", include("orders.urls")),
]
