"""The URLs of the test suite: the admin, and the views for load balancers and
Prometheus."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

from tests.app.ops import ops

urlpatterns = [
    path("admin/", admin.site.urls),
    path("ops/", ops.urls),
    path("txmsg/", include("django_txmsg.urls")),
]
