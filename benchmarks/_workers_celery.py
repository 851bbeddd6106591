"""The app that Celery's worker of `benchmarks.workers` loads."""

from __future__ import annotations

import django

django.setup()

from benchmarks._workers_tasks import celery as app  # noqa: E402 - after setup()

__all__ = ["app"]
