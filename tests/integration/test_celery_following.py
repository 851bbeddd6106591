"""The messages that follow a OnceTask, sent to a real broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from kombu import Connection, Exchange, Queue

from django_txmsg.brokers.celery_publication import Publication
from django_txmsg.celery import calling, following
from django_txmsg.errors import DestinationUnavailable
from tests.celery_shop import app, step
from tests.celery_worker import forget_connections
from tests.proxy import ANSWERS, Proxy
from tests.services import RabbitMQ
from tests.services.stomp_server import PASSWORD, USER


def url(port: int) -> str:
    return f"amqp://{USER}:{PASSWORD}@127.0.0.1:{port}//"


@pytest.fixture
def proxy(rabbitmq: RabbitMQ) -> Iterator[Proxy]:
    """The proxy through which the app sends to RabbitMQ."""
    before = app.conf.broker_url
    with Proxy(rabbitmq.amqp_port) as found:
        app.conf.broker_url = url(found.port)
        forget_connections()
        yield found
        forget_connections()
    app.conf.broker_url = before


def test_a_deleted_queue_is_charged_to_its_own_message(
    proxy: Proxy, rabbitmq: RabbitMQ
) -> None:
    """The queue of the first of three messages was deleted. The connection breaks after
    the broker has returned that message, and before it confirms the others. When the
    others are sent again, the first must not count as sent."""
    exchange = Exchange("tests.celery.topic", type="topic")
    queue = Queue("tests.celery.eu", exchange, routing_key="eu.#")
    run = calling.Run(ended=True)
    calling.current_run.set(run)
    step.apply_async(("of a topic",), queue=queue)
    step.delay("second")
    step.delay("third")
    calling.current_run.set(None)

    def answers_to(work: Callable[[], None]) -> int:
        before = proxy.forwarded[ANSWERS]
        work()
        return proxy.forwarded[ANSWERS] - before

    def fail(*messages: Publication) -> None:
        with pytest.raises(DestinationUnavailable, match=r"takes 'eu\.#' any more"):
            following.publish(app, messages)

    with Connection(url(rabbitmq.amqp_port)) as direct:
        bound = queue(direct.default_channel)
        following.publish(app, run.later)
        closing = answers_to(following.close)
        following.publish(app, run.later)  # a new session, which declares both queues
        bound.delete()
        # This also closes the session.
        returned = answers_to(partial(fail, run.later[0])) - closing
        following.publish(app, run.later)
        bound.delete()
        proxy.cut_after(returned, ANSWERS)
        proxy.delay(0.2)  # so that all are sent before the first is returned
        fail(*run.later)
