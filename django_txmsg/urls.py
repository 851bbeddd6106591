"""`path("txmsg/", include("django_txmsg.urls"))`: health/ and metrics/.

They need no authentication: restrict access at your proxy, or give each view an address
and a guard of your own.
"""

from __future__ import annotations

from django.urls import path

from .health import health
from .metrics import metrics

app_name = "django_txmsg"

urlpatterns = [
    path("health/", health, name="health"),
    path("metrics/", metrics, name="metrics"),
]
