"""`path("txmsg/", include("django_txmsg.urls"))`: health/ and metrics/.

The views require no authentication. Restrict access at your proxy, or give each view a
separate address and a guard of your own.
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
