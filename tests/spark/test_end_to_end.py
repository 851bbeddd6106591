"""The jobs find and repair faults that are planted in the example project's three
services."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from django_txmsg.spark.schemas import Table
from django_txmsg.spark.spec import JobSpec, LakeSpec
from tests.services import PostgreSQL
from tests.spark import three_services
from tests.spark.archives import delta_rows
from tests.spark.conftest import analyzes
from tests.spark.running import run
from tests.spark.three_services import STAGES, ThreeServices

#: Nothing is younger than that by the time it is judged.
JUDGE = ("reconcile", "--grace", "0s", "--late-after", "2h")


@pytest.fixture
def services(postgres: PostgreSQL) -> Iterator[ThreeServices]:
    made = three_services.start(postgres)
    yield made
    three_services.drop(postgres, made)


@analyzes
@pytest.mark.timeout(900)
@pytest.mark.matrix
def test_the_jobs_find_exactly_what_was_planted_and_mend_it(
    spark: object, services: ThreeServices, lake: LakeSpec, tmp_path: Path
) -> None:
    play(services, lake, tmp_path, orders=110)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_jobs_find_planted_faults_among_20_000_messages(
    spark: object, services: ThreeServices, lake: LakeSpec, tmp_path: Path
) -> None:
    play(services, lake, tmp_path, orders=6_700)


def play(services: ThreeServices, lake: LakeSpec, tmp_path: Path, orders: int) -> None:
    services.run(orders)
    everybody = JobSpec(services=tuple(services.sources), lake=lake)
    alone = {s.service: JobSpec(services=(s,), lake=lake) for s in services.sources}
    met = services.met

    # All that is settled goes to the lake; only then some messages come once more, and
    # the last orders have not left yet.
    for service in STAGES:
        facts = run(
            alone[service], "archive", "--older-than", "0s", "--no-vacuum",
            "--batch-rows", "1000",
        )  # fmt: skip
        assert facts["exit_code"] == 0
        assert facts["counts"]["outbox"] > 0.8 * orders
    services.come_again()
    services.place(orders, orders + 3)

    found = run(everybody, *JUDGE)
    planted = {
        "never_received": met["lost"] | met["lost on the second hop"],
        "processed_twice": met["again after the archive"],
        "dead": met["bank closed"] | met["fails"],
        "late": met["late"],
        "unknown_sender": met["unknown"],
    }
    counts = found["counts"]
    ok = counts.pop("ok")
    assert counts == {
        **{verdict: len(ids) for verdict, ids in planted.items()},
        "redelivered_deduplicated": len(met["doubled"]),
        "in_flight": 3,
    }
    assert ok > 2.7 * orders
    assert verdicts(lake) == planted
    assert (found["exit_code"], found["not_received"]) == (1, [])

    report = tmp_path / "report.html"
    seen = run(everybody, "analyze", "--since", "1d", "--html", str(report))
    letters = {row["exception"].partition(":")[0]: row for row in seen["groups"]}
    assert {name: row["open"] for name, row in letters.items()} == {
        "django.db.utils.IntegrityError": len(met["bank closed"]),
        "payments.stages.GatewayDown": len(met["fails"]),
    }
    assert "payments.charge" in report.read_text()

    # What was lost goes out again from the lake, and what the closed bank has killed
    # from the dead letters. Asked for twice, each is stored once.
    services.open_the_bank()
    replays = [
        ("shop", met["lost"], ("--where", chosen(met["lost"]))),
        (
            "payments",
            met["lost on the second hop"],
            ("--where", chosen(met["lost on the second hop"])),
        ),
        (
            "payments",
            met["bank closed"],
            ("--from", "dead_letters", "--where", "exception LIKE '%bank_is_closed%'"),
        ),
    ]
    for service, messages, words in replays:
        first = run(alone[service], "replay", *words)
        # A consumer redelivers the dead letters that the job has asked for.
        services.consume(service)
        again = run(alone[service], "replay", *words)
        assert (first["rows"], again["rows"]) == (len(messages), 0)
    services.finish()

    mended = run(everybody, *JUDGE)["counts"]
    assert "never_received" not in mended
    assert "in_flight" not in mended
    assert mended["dead"] == len(met["fails"])
    # Charged twice, these were shipped twice: no replay undoes that.
    assert mended["processed_twice"] == 3 * len(met["again after the archive"])
    assert_orders_came_through(services, orders + 3)

    # Every run has left a record, in the database and in the lake.
    recorded = services.ask("shop", "SELECT job, state FROM django_txmsg_pipelinerun")
    assert sorted(recorded) == [
        ("analyze", "clean"), ("archive", "clean"), ("reconcile", "findings"),
        ("reconcile", "findings"), ("replay", "clean"), ("replay", "clean"),
    ]  # fmt: skip
    assert rows_of(lake, "runs").num_rows == 3 + 2 + 1 + 6


def assert_orders_came_through(services: ThreeServices, orders: int) -> None:
    """Check that every order was shipped and was charged once, with two exceptions.
    Orders whose payment fails must be neither shipped nor charged. Orders whose message
    was repeated after the archive must be charged twice."""
    open_orders = services.ask(
        "shop", "SELECT number FROM orders_order WHERE status <> 'shipped'"
    )
    assert {row[0] for row in open_orders} == set(services.orders["fails"])
    payments = dict(
        services.ask(
            "payments", 'SELECT "order", count(*) FROM payments_payment GROUP BY 1'
        )
    )
    twice = {order for order, count in payments.items() if count > 1} - {"stranger"}
    assert twice == set(services.orders["again after the archive"])
    assert len(payments) == orders - len(services.orders["fails"]) + 1


def chosen(messages: set[str]) -> str:
    return f"message_id IN ({', '.join(repr(one) for one in sorted(messages))})"


def verdicts(lake: LakeSpec) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in rows_of(lake, "verdicts").to_pylist():
        found.setdefault(row["verdict"], set()).add(row["message_id"])
    return found


def rows_of(lake: LakeSpec, name: str) -> object:
    return delta_rows(lake, Table(name, "", "", (), "", ("",)))
