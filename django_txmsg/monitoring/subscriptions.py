"""The subscribers of the embedded broker's topics, and whether their stages still
exist.

A subscription receives copies until it is ended. If a stage is renamed or removed, its
subscription's queue grows until an operator ends the subscription.
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
    """One subscriber of a topic. `abandoned` means that the subscription belonged to a
    stage of this service, and that this stage no longer exists. Whether a stage of
    another service exists is unknown here."""

    topic: str
    subscriber: str
    used: bool
    abandoned: bool

    @property
    def queue(self) -> str:
        """The queue with its copies."""
        return queue_name(self.topic, self.subscriber)


def served(living: Collection[Worker]) -> set[str]:
    """Return the names of the subscribers under which the stages of these processes
    consume topics."""
    return {f"{one.service}.{stage}" for one in living for stage in one.stages}


def read(using: str, living: Collection[Worker]) -> list[Subscription]:
    """Return all subscriptions, in one query. `living` are the live processes, which
    may run stages that are not declared here (during a deployment, say)."""
    declared = {
        one.subscriber: one.destination for one in all_stages() if one.subscriber
    }
    at_work = served(living)
    own = f"{conf.get().SERVICE}."
    found = []
    for topic, subscriber in (
        QueueSubscription.objects.using(using)
        .order_by("topic", "subscriber")
        .values_list("topic", "subscriber")
    ):
        # A stage with a new topic has left its old subscription behind.
        used = declared.get(subscriber) == topic or (
            subscriber not in declared and subscriber in at_work
        )
        ours = subscriber.startswith(own)
        found.append(Subscription(topic, subscriber, used, ours and not used))
    return found
