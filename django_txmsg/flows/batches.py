"""The flow `Batches`, which has one run for each flow batch of this service.

Importing this module declares the flow. The app's `ready()` imports this module if
`FLOWS["BATCHES"]` is set.
"""

from __future__ import annotations

from dataclasses import replace

from django.db import router

from .. import conf, stages
from ..errors import FlowError
from ..models import Batch, OutboxMessage
from .flow import Flow, step
from .values import BatchEnded, Cancelled, Next


class Batches(
    Flow[BatchEnded, BatchEnded | Cancelled],
    name=f"{conf.get().SERVICE}.batches",
    within=None,
    using=router.db_for_write(OutboxMessage),
):
    """A flow that the package itself declares. Each flow batch of this service is one
    run of this flow."""

    @step
    def start(self, body: BatchEnded) -> Next[BatchEnded | Cancelled]:
        """Raise an error, because no message may start this flow. `batch()` stores runs
        that have already started."""
        raise FlowError("A flow batch is started by batch(), and not by a message.")

    @step
    def ended(self) -> Next[BatchEnded | Cancelled]:
        """Answer with the counts of the batch's messages: how many were answered, were
        given up, or have no answer."""
        batches = Batch.objects.using(self._declaration.using)
        batch = batches.get(run__run_id=self._run_id)
        return BatchEnded(str(self._run_id), *batch.progress)


# No message is sent to its start, which would cost each process a thread and a
# subscription, so its other stage undoes nothing that a stage here has processed.
(_steps,) = stages.find([Batches._declaration.steps_name])
stages.unregister(Batches._declaration.name)
stages.unregister(_steps.name)
stages.register(replace(_steps, undoes=None))
