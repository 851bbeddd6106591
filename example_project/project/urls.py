"""The shop's pages, the admin, and the health view for a load balancer."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("txmsg/", include("django_txmsg.urls")),
    path("", include("orders.urls")),
]
