"""A rolling deployment that changes a message type, and its roll-back. Each message is
processed once, by code that can read it."""

from __future__ import annotations

from decimal import Decimal

from django_txmsg.models import DeadLetter, InboxMessage
from django_txmsg.monitoring import status
from tests.acceptance.crash_play import Manage
from tests.acceptance.versions import First, Second, Third
from tests.app.models import Effect
from tests.faults import ManageProcess, wait_until
from tests.running import IMPATIENT, committing, send, txmsg

pytestmark = committing

#: Messages of each kind at each step.
MANY = 10


class Deployment:
    """The workers of one stage, and the messages sent to it."""

    def __init__(self, manage: Manage, destination: str) -> None:
        self._manage, self._destination = manage, destination
        self._sent: list[str] = []

    def start(self, version: str, service: str = "tests") -> ManageProcess:
        """Start a worker with the code of the given version."""
        worker = self._manage(
            "consume",
            hook=f"tests.acceptance.versions.{version}",
            txmsg={**IMPATIENT, "SERVICE": service},
            env={"VERSIONS": self._destination},
        )
        worker.wait_for_line("Consuming")
        return worker

    @staticmethod
    def stop(worker: ManageProcess) -> None:
        """Stop a worker with SIGTERM, like a deployment."""
        worker.terminate()
        assert worker.wait() == 0

    def send(self, *bodies: object) -> None:
        """Send these bodies. Each body's class decides its version."""
        with txmsg():
            for body in bodies:
                self._sent.append(str(send(self._destination, body).id))

    def done(self, left: int = 0) -> None:
        """Wait until all messages are processed, except `left` messages that need newer
        code. Check that each was processed once, and that none is dead."""
        expected = len(self._sent) - left
        wait_until(
            lambda: Effect.objects.count() >= expected and self.waiting == left,
            deadline=60,
            message=lambda: f"{Effect.objects.count()} done, {self.waiting} wait",
        )
        ids = list(Effect.objects.values_list("message_id", flat=True))
        assert len(ids) == len(set(ids)) == expected
        assert set(ids) <= set(self._sent)
        assert DeadLetter.objects.count() == 0

    @property
    def waiting(self) -> int:
        """The number of messages that the status reports as waiting for newer code."""
        newer = status.read().stages.get(self._destination)
        return newer.newer.count if newer and newer.newer else 0


def both() -> list[object]:
    return [
        order
        for number in range(MANY)
        for order in (First(f"a{number}", 990), Third(f"b{number}", Decimal("9.90")))
    ]


def test_old_and_new_workers_side_by_side_and_back(
    manage: Manage, destination: str
) -> None:
    deployment = Deployment(manage, destination)
    old = deployment.start("first")
    deployment.send(*both())
    deployment.done(left=MANY)

    # The new code comes beside it, and takes what waited; both kinds go on.
    new = deployment.start("third")
    deployment.send(*both())
    deployment.done()
    assert Effect.objects.filter(name__contains="'b").count() == 2 * MANY
    assert not Effect.objects.filter(name__contains="'b", name__startswith=1).exists()

    # It is rolled back: what only it reads waits, at no attempt, and is shown.
    deployment.stop(new)
    deployment.send(*both())
    deployment.done(left=MANY)
    parked = InboxMessage.objects.filter(needs_version=3, due_at__isnull=False)
    assert parked.count() == MANY
    assert set(parked.values_list("attempts", flat=True)) == {0}

    # And deployed again, everywhere.
    new = deployment.start("third")
    deployment.stop(old)
    deployment.send(*both())
    deployment.done()
    deployment.stop(new)
    upgraded = "3 Third(number='a0', amount=Decimal('9.9'), currency='EUR')"
    assert Effect.objects.filter(name=upgraded).exists()


def test_two_services_deploy_when_they_like(manage: Manage, destination: str) -> None:
    """A service that sends and a service that receives are deployed independently. If
    the old receiver can read a new version, it processes the messages immediately.
    Messages of an incompatible version wait for the new receiver, which also reads the
    old versions."""
    deployment = Deployment(manage, destination)
    receiver = deployment.start("first", service="receiver")
    deployment.send(First("1", 1), Second("2", 2, "USD"))
    deployment.done()
    assert Effect.objects.filter(name="1 First(number='2', cents=2)").exists()

    deployment.send(Third("3", Decimal("0.03")))
    deployment.done(left=1)
    deployment.stop(receiver)

    receiver = deployment.start("third", service="receiver")
    deployment.send(First("4", 4), Second("5", 5, "USD"))
    deployment.done()
    read = "3 Third(number='5', amount=Decimal('0.05'), currency='USD')"
    assert Effect.objects.filter(name=read).exists()
    deployment.stop(receiver)
