"""The pipeline as a Django app. Its migrations create the pipeline's tables. On
PostgreSQL, they also add columns with transaction ids to the inbox and the outbox. The
pipeline's jobs use these columns when they read the two tables.

Only Django imports this module, `models` and `migrations`; the jobs do not.
"""

from __future__ import annotations

from django.apps import AppConfig


class PipelineConfig(AppConfig):
    """The app to add to INSTALLED_APPS, in addition to `django_txmsg`."""

    name = "django_txmsg.spark"
    label = "txmsg_spark"
    verbose_name = "Data pipeline"
    default_auto_field = "django.db.models.BigAutoField"
