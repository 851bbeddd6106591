"""A turn of a run does not take longer if many runs are waiting, or if the run has
slept many times before. A run can wait for many branches."""

from __future__ import annotations

import datetime as dt
import statistics
import time
from collections.abc import Callable

import pytest
from django.db import connection, transaction

from django_txmsg import Destination, stages, wire
from django_txmsg.flows import Answers, Flow, Next, resume, start, step
from django_txmsg.flows.deadlines import Deadlines
from django_txmsg.models import Batch, OutboxMessage, Run
from django_txmsg.testing import drain
from tests.running import committing, declared, ship, txmsg
from tests.running import step as take
from tests.shelved_flows import at_hand, shelved

pytestmark = [committing, pytest.mark.postgresql, pytest.mark.soak]

#: The least time counts of this many calls: the machine may have other work.
CALLS = 200


@shelved
class Patient(Flow[int, bool], name="scale.patient", within=dt.timedelta(days=30)):
    @step
    def start(self, number: int) -> Next[bool]:
        return self.wait(then=self.approved)

    @step
    def approved(self, yes: bool) -> Next[bool]:
        return yes


def fill(first: int, last: int) -> None:
    """Store runs that wait for resume(), with deadlines in the coming month."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO django_txmsg_run (run_id, service, flow, key, version, state,
                step, reads, otherwise, turn, waits_for, asked, due_at, failing, undos,
                answer, answer_type, outcome, caller, first_run, hop, baggage,
                correlation_id)
            SELECT id, 'tests', 'scale.patient', number::text, 1, '{}', 'approved', '',
                '', gen_random_uuid(), 'resume', '',
                now() + interval '1 day' + random() * interval '29 days', false, 0,
                '', '', '', '{}', id, 0, '{}', id::text
            FROM (SELECT gen_random_uuid() AS id, number
                  FROM generate_series(%s, %s) AS number) AS given
            """,
            [first, last],
        )
        cursor.execute("VACUUM ANALYZE django_txmsg_run")


def least(call: Callable[[], None]) -> float:
    """Return the shortest time of several calls, in milliseconds."""
    times = []
    for _ in range(CALLS):
        began = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - began))
    return min(times)


def measured() -> tuple[float, float]:
    """Return two durations in milliseconds: of a check for passed deadlines that finds
    none, and of a resume()."""
    waiting = iter(list(Run.objects.order_by("-pk")[:CALLS]))
    deadlines = Deadlines(["default"])

    def resume_one() -> None:
        run = next(waiting)
        assert run.turn is not None
        with transaction.atomic():
            resume(wire.ticket(run.run_id, run.turn), True)

    looked, resumed = least(deadlines.tick), least(resume_one)
    assert OutboxMessage.objects.count() == CALLS
    OutboxMessage.objects.all().delete()
    return looked, resumed


@pytest.mark.timeout(1800)
def test_a_million_waiting_runs_cost_what_a_thousand_cost() -> None:
    with txmsg(SERVICE="tests", DISPATCH_ON_COMMIT="off"), at_hand(Patient):
        fill(1, 1_000)
        few = measured()
        fill(1_001, 1_000_000)
        many = measured()
    print(  # noqa: T201 - what a soak is for
        f"\nan empty look: {few[0]:.2f} ms of 1,000 runs, {many[0]:.2f} of 1,000,000; "
        f"a resume: {few[1]:.2f} ms and {many[1]:.2f}"
    )
    assert many[0] <= max(2.0, 1.2 * few[0])
    assert many[1] <= max(1.2 * few[1], few[1] + 1.0)


def test_former_names_do_not_make_the_check_for_deadlines_slower() -> None:
    former = {"SERVICE": "tests", "FORMER_SERVICES": ["before"]}
    with txmsg(**former), at_hand(Patient):
        fill(1, 1_000)
        few = least(Deadlines(["default"]).tick)
        fill(1_001, 30_000)
        many = least(Deadlines(["default"]).tick)
    assert many <= 2 * few


@shelved
class Restless(Flow[int, int], name="scale.restless", within=dt.timedelta(days=30)):
    slept: int = 0

    @step
    def start(self, times: int) -> Next[int]:
        self.slept = -times
        return self.again()

    @step
    def again(self) -> Next[int]:
        if self.slept == 0:
            return 1
        self.slept += 1
        return self.sleep(dt.timedelta(milliseconds=1), then=self.again)


@pytest.mark.timeout(3600)
def test_the_last_of_ten_thousand_sleeps_costs_what_an_early_one_costs() -> None:
    """A run sleeps ten thousand times. Its late turns take no longer than its early
    ones, and its row does not grow. Each turn checks the deadlines, dispatches a
    message and runs a step."""
    times: list[float] = []
    with txmsg(SERVICE="tests", DISPATCH_ON_COMMIT="off"), at_hand(Restless):
        deadlines = Deadlines(["default"])
        begins, steps = (
            stages.find([name])[0]
            for name in ("scale.restless", "scale.restless.steps")
        )
        with transaction.atomic():
            run = start(Restless, 10_000)
        ship()
        take(begins)
        while not run.ended_at:
            began = time.perf_counter()
            deadlines.tick()
            if ship():
                take(steps)
                times.append(1000 * (time.perf_counter() - began))
            run.refresh_from_db()
            assert len(run.state) < 100
    assert (run.answer, len(times)) == ("1", 10_000)
    early, late = statistics.median(times[500:1500]), statistics.median(times[-1000:])
    print(f"\na turn: {early:.1f} ms after 500 sleeps, {late:.1f} after 9,000")  # noqa: T201
    assert late <= 1.5 * early


price = Destination("scale.price", int, reply=int)


@shelved
class Wide(Flow[int, int], name="scale.wide", within=dt.timedelta(days=30)):
    @step
    def start(self, branches: int) -> Next[int]:
        asked = [self.branch(price, number) for number in range(branches)]
        return self.gather(asked, then=self.ready)

    @step
    def ready(self, answers: Answers[int]) -> Next[int]:
        return sum(answers)


@pytest.mark.timeout(3600)
def test_a_gather_of_ten_thousand_branches_answers_once() -> None:
    def same(number: int) -> int:
        return number

    answers = declared(same, price, name="scale.price")
    with txmsg(SERVICE="tests", DISPATCH_ON_COMMIT="off"), at_hand(Wide), answers:
        with transaction.atomic():
            run = start(Wide, 10_000)
        began = time.perf_counter()
        drain(limit=100_000)
        run.refresh_from_db()
    print(f"\n10,000 branches: {time.perf_counter() - began:.0f} s")  # noqa: T201
    assert run.answer == str(sum(range(10_000)))
    assert Batch.objects.get().progress.open == 0
