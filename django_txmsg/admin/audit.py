"""Django's admin log as the audit log of what operators do."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import Model
from django.http import HttpRequest


def audit(request: HttpRequest, subject: Model, text: str) -> None:
    """Write an entry into the admin's log: user, action, object."""
    user: Any = request.user
    LogEntry.objects.create(
        user_id=user.pk,
        content_type_id=ContentType.objects.get_for_model(subject).pk,
        object_id=str(subject.pk),
        object_repr=str(subject)[:200],
        action_flag=CHANGE,
        change_message=text,
    )
