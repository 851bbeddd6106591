"""One thread for each database renews all leases of the process."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
from django.db.backends.base.base import BaseDatabaseWrapper

from django_txmsg.runtime import leases
from django_txmsg.runtime.leases import Lease
from tests.faults import wait_until


def keepers() -> list[str]:
    return [one.name for one in threading.enumerate() if "txmsg-leases" in one.name]


def test_a_database_that_hangs_costs_no_lease_in_another() -> None:
    asked, back = threading.Event(), threading.Event()
    renewed: list[int] = []

    def hang() -> None:
        asked.set()
        assert back.wait(60)

    try:
        with (
            Lease("default", 0.2, hang, since=time.monotonic()),
            Lease(
                "other", 0.2, lambda: renewed.append(1), since=time.monotonic()
            ) as lease,
        ):
            assert asked.wait(30)
            del renewed[:]
            wait_until(lambda: len(renewed) > 3)
            assert lease.left > 0
    finally:
        back.set()


def test_a_renewal_that_hangs_does_not_hold_up_its_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leases, "HANGS", 0.1)
    asked, back = threading.Event(), threading.Event()

    def hang() -> None:
        asked.set()
        assert back.wait(60)

    with Lease("default", 0.2, hang, since=time.monotonic()) as lease:
        assert asked.wait(30)
        began = time.monotonic()
        with lease.between_renewals():
            back.set()
        assert time.monotonic() - began < 30


def test_the_time_of_a_lease_begins_before_it_is_granted() -> None:
    """The time of a lease is counted from an instant before the claim, because the
    claim may return long after the database has set the end of the lease."""
    with Lease("other", 60.0, lambda: None, since=time.monotonic() - 40) as lease:
        assert lease.left <= 20
        assert not lease.lapsed


def test_a_lease_ends_while_the_machine_is_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lease = Lease("other", 60.0, lambda: None, since=time.monotonic())
    real = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + 100)
    assert lease.lapsed
    lease.renew()
    assert lease.lapsed
    assert 59 < lease.left <= 60


def test_many_leases_in_one_database_share_a_thread() -> None:
    renewed: set[int] = set()
    many = [
        Lease("other", 0.2, partial(renewed.add, number), since=time.monotonic())
        for number in range(20)
    ]
    for lease in many:
        lease.begin()
        lease.begin()
    try:
        wait_until(lambda: len(renewed) == 20)
        assert keepers().count("txmsg-leases-other") == 1
    finally:
        for lease in many:
            lease.end()


def test_a_renewal_that_fails_is_tried_again() -> None:
    renewed: list[float] = []

    def renew() -> None:
        renewed.append(0)
        if len(renewed) < 3:
            raise ValueError("any reason")

    with Lease("other", 0.2, renew, since=time.monotonic()):
        wait_until(lambda: len(renewed) > 3)


def test_an_error_while_the_connection_closes_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renewed: list[int] = []
    failed = threading.Event()
    real = BaseDatabaseWrapper.close

    def close(wrapper: BaseDatabaseWrapper) -> None:
        if threading.current_thread().name in keepers() and not failed.is_set():
            failed.set()
            raise ValueError("any reason")
        real(wrapper)

    monkeypatch.setattr(BaseDatabaseWrapper, "close", close)
    with Lease("other", 0.2, lambda: renewed.append(1), since=time.monotonic()):
        assert failed.wait(30)
        del renewed[:]
        wait_until(lambda: len(renewed) > 1)


def test_renewals_that_follow_each_other_at_once_do_not_hold_up_their_lane() -> None:
    """A renewal that takes longer than half of the lease is due again when it ends."""
    begun: list[float] = []
    running, ended = threading.Event(), threading.Event()

    def renew() -> None:
        begun.append(time.monotonic())
        running.set()
        ended.wait(0.02)
        running.clear()

    lease = Lease("default", 0.02, renew, since=time.monotonic())

    def renew_always() -> None:
        while not ended.is_set():
            lease.renew()

    renewing = threading.Thread(target=renew_always)
    renewing.start()
    try:
        for _ in range(50):
            assert running.wait(30)
            before = len(begun)
            with lease.between_renewals():
                assert not running.is_set()
                # One may have begun before the lane began to wait.
                assert len(begun) <= before + 1
    finally:
        ended.set()
        renewing.join()
