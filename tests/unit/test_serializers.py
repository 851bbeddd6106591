"""Bodies are encoded to bytes and decoded again. If a value cannot be converted, the
package raises one of its own errors."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import encodings
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_txmsg import wire
from django_txmsg.envelope import serializers
from django_txmsg.errors import DecodeError, InvalidMessage

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
)


@given(JSON | st.binary())
def test_a_serialized_body_is_read_back_equal(body: object) -> None:
    assert serializers.decode(*serializers.encode(body)) == body


@given(st.binary(), st.sampled_from(["application/json", "text/plain", "a/b"]))
def test_any_bytes_are_decoded_or_refused_by_name(data: bytes, kind: str) -> None:
    with contextlib.suppress(DecodeError):
        serializers.decode(data, kind)


@pytest.mark.parametrize("charset", ["punycode", "IDNA", "klingon"])
def test_text_in_charset_of_domain_names_is_refused_as_unknown_charset_is(
    charset: str,
) -> None:
    with pytest.raises(DecodeError, match="not text in") as refused:
        serializers.decode(b"abc", f"text/plain; charset={charset}")
    assert refused.value.reason == "undecodable_body"
    assert serializers.decode(b"abc", "text/plain; charset=koi8-u") == "abc"


@pytest.mark.parametrize("charset", ["x" * 100_000, "x" * 41, "no\ttext", "\xe9"])
def test_a_name_that_no_charset_has_is_not_remembered(charset: str) -> None:
    """Python remembers every name that it looks up. A sender can choose other names
    without end."""
    with pytest.raises(DecodeError, match="not text in"):
        serializers.decode(b"abc", f"text/plain; charset={charset}")
    assert charset not in encodings._cache  # type: ignore[attr-defined]


@pytest.mark.parametrize("charset", ["ISO_8859-1:1987", "latin 1", '"Shift_JIS"'])
def test_names_of_charsets_are_found(charset: str) -> None:
    assert serializers.decode(b"abc", f"text/plain; charset={charset}") == "abc"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (decimal.Decimal("1.10"), "1.10"),
        (uuid.UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (dt.date(2024, 2, 29), "2024-02-29"),
        (dt.time(1, 2, 3), "01:02:03"),
        (dt.timedelta(days=1, seconds=2), "P1DT2S"),
    ],
)
def test_types_unknown_to_json_travel_as_text(value: object, text: str) -> None:
    assert serializers.decode(*serializers.encode({"v": value})) == {"v": text}


@pytest.mark.parametrize(
    "bad", [object(), {1, 2}, float("nan"), float("inf"), {"a": "\ud800"}, {(1,): 2}]
)
def test_unencodable_bodies_are_refused(bad: object) -> None:
    with pytest.raises(InvalidMessage):
        serializers.encode(bad)


def test_body_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(InvalidMessage):
        serializers.encode(loop)


@pytest.mark.parametrize("body", [b"1e400", b'{"n": [-1e400]}', b"Infinity", b"NaN"])
def test_number_that_is_no_float_is_refused(body: bytes) -> None:
    assert serializers.decode(b"[1.5, 1e308]", wire.JSON) == [1.5, 1e308]
    with pytest.raises(DecodeError, match="not valid JSON"):
        serializers.decode(body, wire.JSON)
