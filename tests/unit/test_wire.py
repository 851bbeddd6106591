"""Ids and instants in messages have the same form in every release."""

from __future__ import annotations

import datetime as dt
import re
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_txmsg import wire
from django_txmsg.envelope.message import new_id


def test_derived_ids_are_what_they_were_in_the_first_release() -> None:
    """Every release derives the same ids. If a derived id changed, the receiver's inbox
    would not recognize a duplicate."""
    space = uuid.UUID("86f79ce9-ac6e-4a7d-ade4-44f29f8b6b22")
    cause = uuid.UUID(int=1)
    assert wire.derived_id("shop", cause, "orders", 0) == uuid.uuid5(
        space, f'["sent","shop","{cause}","orders",0]'
    )
    assert wire.session_id("shop", cause, "orders") == uuid.uuid5(
        space, f'["session","shop","{cause}","orders"]'
    )
    begins = uuid.UUID("019e2f6c-0123-7abc-8def-0123456789ab")
    sent = wire.derived_id("shop", begins, "orders", 0)
    assert sent == uuid.UUID("019e2f6c-0123-84a1-966a-b653ee1c3571")
    assert wire.derived_id("shop", sent, "pay", 0) == uuid.UUID(
        "019e2f6c-0123-8748-9b16-5464d60e7d55"
    )


def test_foreign_id_with_half_of_a_surrogate_pair_gives_an_id() -> None:
    ids = {wire.others_id("shop", {"cap-msg-id": one}) for one in ("\ud800", "\udfff")}
    assert len(ids - {None}) == 2


@given(st.uuids(version=4), st.integers(0, 2**48 - 1), st.sampled_from([7, 8]))
def test_what_a_stage_sends_begins_with_the_instant_of_its_cause(
    other: uuid.UUID, at: int, version: int
) -> None:
    """The id of a message that a stage sends begins with the time in the id of its
    cause. So the index grows at one end. In a table of millions of rows, each random id
    would change a different page of the index."""
    behind = other.int & ((1 << 76) - 1)
    cause = uuid.UUID(int=at << 80 | version << 76 | behind)
    sent = wire.derived_id("shop", cause, "orders", 0)
    assert (sent.int >> 80, sent.version, sent.variant) == (at, 8, uuid.RFC_4122)
    named = uuid.uuid5(wire.NAMESPACE, f'["sent","shop","{cause}","orders",0]')
    assert sent.int & ((1 << 76) - 1) == named.int & ((1 << 76) - 1)
    assert wire.derived_id("shop", other, "orders", 0).version == 5


@given(st.text(), st.uuids(), st.text(), st.integers(0))
def test_derived_ids_differ_by_service_cause_stage_and_ordinal(
    service: str, cause: uuid.UUID, stage: str, ordinal: int
) -> None:
    one = wire.derived_id(service, cause, stage, ordinal)
    assert one == wire.derived_id(service, cause, stage, ordinal)
    assert one != wire.derived_id(service, cause, stage, ordinal + 1)
    assert one != wire.derived_id(service, cause, stage + "x", ordinal)
    assert one != wire.derived_id(service + "x", cause, stage, ordinal)
    # Separators in names do not make two names one.
    assert wire.derived_id("a/b", cause, "c", 0) != wire.derived_id(
        "a", cause, "b/c", 0
    )
    assert wire.session_id(service, cause, f"{stage}/0") != wire.derived_id(
        service, cause, stage, 0
    )


@given(
    st.datetimes(
        dt.datetime(2, 1, 3), dt.datetime(9998, 12, 29),
        timezones=st.timezones(), allow_imaginary=False,
    )
)  # fmt: skip
def test_written_instant_is_read_back_equal(instant: dt.datetime) -> None:
    text = wire.format_instant(instant)
    assert wire.parse_instant(text) == instant.astimezone(dt.timezone.utc)


@pytest.mark.parametrize(
    ("fraction", "microseconds"),
    [("", 0), (".5", 500_000), (".0123", 12_300), (".123456789", 123_456)],
)
def test_an_instant_of_another_language_has_any_number_of_digits(
    fraction: str, microseconds: int
) -> None:
    expected = dt.datetime(2024, 2, 29, 12, 0, 0, microseconds, dt.timezone.utc)
    assert wire.parse_instant(f"2024-02-29T12:00:00{fraction}Z") == expected


@pytest.mark.parametrize(
    ("offset", "before"), [("+23:59", "23:59"), ("+00:00:30.5", "00:00:30.500")]
)
def test_an_instant_of_any_offset_is_read_in_utc(offset: str, before: str) -> None:
    """PostgreSQL refuses these offsets, so the instant must not keep them."""
    read = wire.parse_instant(f"2024-03-01T{before}{offset}")
    assert read.isoformat() == "2024-03-01T00:00:00+00:00"


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "yesterday",
        "2024-02-29T12:00:00",
        "2023-02-29",
        "0001-01-01T00:00:00+23:59",
        "9999-12-31T23:59:59-23:59",
    ],
)
def test_an_instant_needs_a_date_a_time_and_a_zone(bad: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - Python's own words
        wire.parse_instant(bad)


@pytest.mark.parametrize("page", ["reference/wire.md", "how-to/java.md"])
def test_the_headers_with_underscores_are_those_that_the_pages_name(page: str) -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    assert (
        set(re.findall(r"`(txmsg_\w+)`", (docs / page).read_text())) == wire.TWIN_NAMES
    )


def test_new_ids_are_uuid7_and_grow_with_time() -> None:
    first = new_id()
    before = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 <= before:
        pass
    second = new_id()
    assert (second.version, second.variant) == (7, uuid.RFC_4122)
    assert first < second
    assert abs((second.int >> 80) / 1000 - time.time()) < 60
