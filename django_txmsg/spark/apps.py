"""The pipeline as a Django app: its tables, and the columns by which it reads
PostgreSQL.

Django imports this, `models` and `migrations`; no job does.
"""

from __future__ import annotations

from django.apps import AppConfig


class PipelineConfig(AppConfig):
    """django_txmsg.spark in INSTALLED_APPS, beside django_txmsg."""

    name = "django_txmsg.spark"
    label = "txmsg_spark"
    verbose_name = "Data pipeline"
    default_auto_field = "django.db.models.BigAutoField"
