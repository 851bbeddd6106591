"""The subscriptions to topics of the embedded broker, and whether their stages still
exist.

A subscription receives a copy of each message until an operator removes the
subscription. If its stage was renamed or removed, the subscription's queue grows
without limit.
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
    """One subscription to a topic.

    A subscription is `abandoned` if its stage belonged to this service and no longer
    consumes the topic. A subscription of another service is never `abandoned`, because
    the stages of other services are unknown here.
    """

    topic: str
    subscriber: str
    used: bool
    abandoned: bool
    database: str

    @property
    def queue(self) -> str:
        """The queue that receives the subscription's copies."""
        return queue_name(self.topic, self.subscriber)


def served(living: Collection[Worker]) -> set[str]:
    """Return the names under which the stages of these processes subscribe to
    topics."""
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
        found.append(Subscription(topic, subscriber, used, ours and not used, using))
    return found
