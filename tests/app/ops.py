"""A second admin site of a project, for its operators."""

from __future__ import annotations

from django.contrib import admin

from django_txmsg import models
from django_txmsg.admin.bulk import BulkAdmin
from django_txmsg.admin.dead_letters import DeadLetterAdmin
from django_txmsg.admin.inbox import InboxAdmin
from django_txmsg.admin.lists import WorkerAdmin
from django_txmsg.admin.outbox import OutboxAdmin
from django_txmsg.admin.stages import StageAdmin

ops = admin.AdminSite(name="ops")
ops.register(models.OutboxMessage, OutboxAdmin)
ops.register(models.InboxMessage, InboxAdmin)
ops.register(models.DeadLetter, DeadLetterAdmin)
ops.register(models.BulkOperation, BulkAdmin)
ops.register(models.StageState, StageAdmin)
ops.register(models.Worker, WorkerAdmin)
