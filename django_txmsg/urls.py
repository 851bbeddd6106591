"""`path("txmsg/", include("django_txmsg.urls"))`: health/ and metrics/.

They ask for no password: let your proxy decide who may come here.
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
