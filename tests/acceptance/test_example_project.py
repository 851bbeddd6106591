"""The example project on PostgreSQL and ActiveMQ. The tests use it like a user."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests import services
from tests.acceptance.shop import environment, load_demo
from tests.admin.browser import PHONE, WIDE, browser, missing
from tests.faults import wait_until
from tests.services.keeper import KEEPER

pytestmark = pytest.mark.timeout(300)
demo = load_demo()


class Stand:
    """The running project: the address of its web server, and its processes."""

    def __init__(self, base: str, env: dict[str, str], processes: list[Any]) -> None:
        self.env, self.processes = env, processes
        self.shop = demo.Shop(base)

    def over(self, number: str, *, arrives: bool = True) -> dict[str, Any]:
        """Wait until an order is completed."""
        seen: dict[str, Any] = demo.wait(
            lambda: self.shop.over(number, arrives),
            f"order {number} to come to its end",
            self.processes,
        )
        return seen

    def rows(self, sql: str, *parameters: object) -> list[Any]:
        """Query the project's database."""
        with psycopg.connect(self.env["DATABASE_URL"]) as connection:
            return connection.execute(sql, parameters).fetchall()


@pytest.fixture(scope="module")
def stand(
    postgres: services.PostgreSQL,
    activemq: services.ActiveMQ,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stand]:
    """The project with its own database, web server, relay and consumer."""
    env = environment(
        DATABASE_URL=postgres.create_database("shop"),
        TXMSG_BROKER_URL=activemq.url(),
    )
    logs = tmp_path_factory.mktemp("shop")
    demo.command(env, "migrate", "--verbosity", "0")
    port = demo.free_port()
    with (
        demo.process(
            env, logs, "web", "runserver", "--noreload", f"127.0.0.1:{port}"
        ) as web,
        demo.process(env, logs, "relay", "relay") as relay,
        demo.process(env, logs, "consume", "consume") as consume,
    ):
        for one in (web, relay, consume):
            KEEPER.watch(one.pid, signal.SIGKILL)
        running = Stand(f"http://127.0.0.1:{port}", env, [web, relay, consume])
        demo.wait(running.shop.answers, "the web server", running.processes)
        yield running
        for one in (web, relay, consume):
            one.stop()
            KEEPER.forget(one.pid)
    postgres.drop_database("shop")


def test_its_settings_are_sound_and_its_migrations_complete(stand: Stand) -> None:
    demo.command(stand.env, "check", "--fail-level", "WARNING")
    demo.command(stand.env, "makemigrations", "--check", "--dry-run")


def test_orders_are_paid_and_shipped_once(stand: Stand) -> None:
    numbers = [stand.shop.order("Box of tea", pieces) for pieces in range(1, 6)]

    orders = [stand.over(number) for number in numbers]

    for order in orders:
        assert [hop["destination"] for hop in order["hops"]] == [
            "payments.charge",
            "shipping.ship",
            "orders.shipped",
        ]
        assert [hop["next"] for hop in order["hops"]] == [
            ["shipping.ship"],
            ["orders.shipped"],
            [],
        ]
        assert all(hop["attempts"] == 1 for hop in order["hops"])
        payments = stand.rows(
            'SELECT amount FROM payments_payment WHERE "order" = %s', order["number"]
        )
        parcels = stand.rows(
            'SELECT tracking_code FROM shipping_parcel WHERE "order" = %s',
            order["number"],
        )
        assert len(payments) == 1
        assert parcels == [(order["tracking_code"],)]


def test_checkouts_end_once_and_what_nobody_approves_is_undone(stand: Stand) -> None:
    small, approved, left = (
        stand.shop.check_out("Box of tea", quantity) for quantity in (1, 30, 31)
    )
    for run in (approved, left):
        demo.wait(
            lambda run=run: stand.shop.run(run)["step"] == "approved",
            f"order {run.number} to wait for an approval",
            stand.processes,
        )

    token = 'SELECT token FROM orders_approval WHERE "order" = %s'
    before = stand.rows(token, approved.number)
    go_back = ("txmsg", "flows", "go-back", approved.run_id, "--to", "reserved")
    demo.command(stand.env, *go_back)
    demo.wait(
        lambda: stand.rows(token, approved.number) != before,
        f"order {approved.number} to wait for another approval",
        stand.processes,
    )
    stand.shop.approve(approved.number)
    demo.command(stand.env, "txmsg", "flows", "time-out", left.run_id)

    outcomes = [
        demo.wait(
            lambda run=run: stand.shop.run(run, seconds=5)["outcome"],
            f"the checkout of order {run.number} to end",
            stand.processes,
        )
        for run in (small, approved, left)
    ]
    assert outcomes == ["answered", "answered", "failed"]
    money = 'SELECT count(*), sum(amount) FROM payments_payment WHERE "order" = %s'
    kept = 'SELECT count(*) FROM shipping_reservation WHERE "order" = %s'
    found = [
        (*stand.rows(money, run.number), *stand.rows(kept, run.number))
        for run in (small, approved, left)
    ]
    assert [(int(count), float(total), kept) for (count, total), (kept,) in found] == [
        (1, 11.2, 1),
        (1, 336.0, 1),
        (2, 0.0, 0),
    ]


def test_a_failing_payment_is_tried_three_times_and_leaves_nothing(
    stand: Stand,
) -> None:
    number = stand.shop.order("Pot of honey", 1, fails=True)

    (hop,) = stand.over(number, arrives=False)["hops"]

    assert (hop["destination"], hop["state"]) == ("payments.charge", "dead")
    assert hop["attempts"] == 3
    assert f"the bank does not answer for order {number}" in hop["error"]
    paid = 'SELECT 1 FROM payments_payment WHERE "order" = %s'
    assert stand.rows(paid, number) == []


def test_a_redelivered_letter_that_dies_again_is_marked(stand: Stand) -> None:
    number = stand.shop.order("Pot of honey", 2, fails=True)
    message = stand.over(number, arrives=False)["hops"][0]["id"]

    demo.command(stand.env, "dead_letters", "redeliver", message)

    deaths = "SELECT deaths, resolution FROM django_txmsg_deadletter"
    wait_until(
        lambda: stand.rows(f"{deaths} WHERE message_id = %s", message) == [(2, "open")],
        deadline=60,
    )
    listed = json.loads(
        demo.command(stand.env, "dead_letters", "list", "--json", "--again")
    )
    assert message in json.dumps(listed)


def test_a_person_sees_an_order_fail_in_the_browser(stand: Stand) -> None:
    absent = missing()
    if absent and os.environ.get("CI") == "true":
        pytest.fail(absent)
    if absent:
        pytest.skip(absent)

    with browser(stand.shop.base) as chromium:
        chromium.open("/")
        chromium.find("input[name=payment_fails]").click()
        chromium.click("Order")
        # The test does not reload the page: the page updates itself.
        assert chromium.find(".steps .dead").text == "Paid"
        assert "the bank does not answer" in chromium.text
        for path in ("/", chromium.driver.current_url.removeprefix(stand.shop.base)):
            for dark in (False, True):
                for size in (WIDE, PHONE):
                    chromium.look(dark=dark, size=size)
                    chromium.open(path)
                    assert not chromium.overflows(), (path, dark, size)
        assert chromium.errors() == []
