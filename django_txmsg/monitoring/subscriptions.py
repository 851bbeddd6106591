"""The subscribers of the embedded broker's topics, and whether their stages still
exist.

A subscription receives copies from its beginning until it is ended. The subscription of
a renamed or removed stage grows until an operator ends it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .. import conf
from ..models import QueueSubscription, Worker
from ..models.queue import queue_name
from ..stages import all_stages


@dataclass(frozen=True)
class Subscription:
    """One subscriber of a topic. `abandoned` means that it belonged to a stage of this
    service that no longer exists. Nothing is known here about another service's
    stages."""

    topic: str
    subscriber: str
    used: bool
    abandoned: bool

    @property
    def queue(self) -> str:
        """The queue of its copies."""
        return queue_name(self.topic, self.subscriber)


def read(using: str, living: Collection[Worker]) -> list[Subscription]:
    """Return all subscriptions, in one query. `living` are the live processes: they may
    run stages that are not declared here, as during a deployment."""
    declared = {
        one.subscriber: one.destination for one in all_stages() if one.subscriber
    }
    served = {f"{one.service}.{stage}" for one in living for stage in one.stages}
    own = f"{conf.get().SERVICE}."
    found = []
    for topic, subscriber in (
        QueueSubscription.objects.using(using)
        .order_by("topic", "subscriber")
        .values_list("topic", "subscriber")
    ):
        # A stage with a new topic has left its old subscription behind.
        used = declared.get(subscriber) == topic or (
            subscriber not in declared and subscriber in served
        )
        ours = subscriber.startswith(own)
        found.append(Subscription(topic, subscriber, used, ours and not used))
    return found
