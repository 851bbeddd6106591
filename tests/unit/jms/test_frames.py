"""Frames are encoded and parsed correctly: with all escapes, with data that is split
anywhere, without an injection and without a crash."""

from __future__ import annotations

import contextlib
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_txmsg.jms import MessageFormatError
from django_txmsg.jms.frames import (
    Frame,
    FrameParser,
    ProtocolError,
    Receipt,
    encode,
    encode_connect,
    header_lines,
)
from django_txmsg.testing import frames as peer_frames

ANY_TEXT = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]))
HEADERS = st.dictionaries(
    ANY_TEXT.filter(lambda name: name not in ("", "content-length", "receipt-id")),
    ANY_TEXT,
    max_size=6,
)
STREAM = (
    b"\n\r\nMESSAGE\nack:1\na\\cb:x\\ny\\r\\\\\ncontent-length:5\n\n\x00b\n\x00c\x00"
    b"RECEIPT\nreceipt-id:1-1\n\n\x00\n"
    b"ERROR\r\nmessage:no\r\n\r\nwithout a length\x00\n\n"
    b"RECEIPT\r\nreceipt-id:1-2\r\n\r\n\x00"
    b"MESSAGE\nack:2\n\n\x00"
)
EXPECTED = [
    Frame(
        "MESSAGE", {"ack": "1", "a:b": "x\ny\r\\", "content-length": "5"}, b"\0b\n\0c"
    ),
    Receipt(b"1-1"),
    Frame("ERROR", {"message": "no"}, b"without a length"),
    Receipt(b"1-2"),
    Frame("MESSAGE", {"ack": "2"}, b""),
]


@pytest.mark.parametrize("at", range(len(STREAM) + 1))
def test_a_stream_split_at_any_byte_gives_the_same_frames(at: int) -> None:
    parser = FrameParser()

    found = parser.feed(STREAM[:at]) + parser.feed(STREAM[at:])

    assert found == EXPECTED


def test_a_stream_arriving_byte_by_byte_gives_the_same_frames() -> None:
    parser = FrameParser()

    found = [frame for byte in STREAM for frame in parser.feed(bytes([byte]))]

    assert found == EXPECTED


@given(headers=HEADERS, body=st.binary(), cuts=st.lists(st.integers(0, 2000)))
def test_what_is_encoded_is_decoded_again_in_any_split(
    headers: dict[str, str], body: bytes, cuts: list[int]
) -> None:
    headers = {**headers, "content-length": str(len(body))}
    data = encode("MESSAGE", headers, body)

    parser, found, start = FrameParser(), [], 0
    for cut in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
        found += parser.feed(data[start:cut])
        start = cut

    assert found == [Frame("MESSAGE", headers, body)]


@given(headers=HEADERS, body=st.binary())
def test_another_implementation_reads_what_is_encoded(
    headers: dict[str, str], body: bytes
) -> None:
    headers = {**headers, "content-length": str(len(body))}

    (frame,) = peer_frames.Decoder().feed(encode("SEND", headers, body))

    assert (dict(frame.headers), frame.body) == (headers, body)


@given(st.lists(st.binary(max_size=40)))
def test_random_bytes_give_frames_or_a_protocol_error_and_nothing_else(
    pieces: list[bytes],
) -> None:
    parser = FrameParser()

    with contextlib.suppress(ProtocolError):
        for piece in pieces:
            parser.feed(piece)


@given(st.binary(max_size=60).filter(lambda block: b"\x00" not in block))
def test_any_header_block_of_a_parsable_frame_is_handed_on(block: bytes) -> None:
    data = (
        b"MESSAGE\nack:7\n" + block.replace(b"\n\n", b"").strip(b"\r\n") + b"\n\n\x00"
    )

    parser = FrameParser()
    try:
        found = parser.feed(data) + parser.feed(b"RECEIPT\nreceipt-id:1-9\n\n\x00")
    except ProtocolError:  # a content-length of the fuzz that the body is not
        return

    assert not found or isinstance(found[0], Frame)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"a:\\q", "unknown escape"),
        (b"a:\\", "unknown escape"),
        (b"no colon", "without a name or colon"),
        (b":no name", "without a name or colon"),
        (b"a:\xff", "not UTF-8"),
        (b"content-length:many", "content-length"),
        (b"content-length:-1", "content-length"),
        ("content-length:\u0661".encode(), "content-length"),
        (b"a:b\0c", "NUL"),
        (b"a\0:b", "NUL"),
        (b"\0", "NUL"),
    ],
)
def test_a_broken_header_is_noted_and_the_stream_goes_on(
    line: bytes, problem: str
) -> None:
    parser = FrameParser()

    broken, after = parser.feed(
        b"MESSAGE\nack:1\n"
        + line
        + b"\n\nbody\x00"
        + b"RECEIPT\nreceipt-id:1-1\n\n\x00"
    )

    assert isinstance(broken, Frame)
    assert broken.headers["ack"] == "1"
    assert broken.body == b"body"
    assert problem in str(broken.problem)
    assert after == Receipt(b"1-1")


@pytest.mark.parametrize(
    "data",
    [
        b"RECEIPT\nreceipt-id:1\x00",
        b"MESSAGE\ncontent-length:2\n\nabc\x00",
        b"MESSAGE\ncontent-length:" + b"9" * 5000 + b"\n\n",
        b"x" * ((1 << 24) + 1),
    ],
)
def test_a_stream_out_of_step_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        FrameParser().feed(data)


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
@pytest.mark.parametrize("counted", [True, False])
def test_a_body_too_long_to_keep_goes_by_and_the_stream_goes_on(
    size: int, counted: bool
) -> None:
    parser = FrameParser(max_body=100_000)
    body = b"b" * 300_000
    length = b"content-length:%d\n" % len(body) if counted else b""
    data = b"MESSAGE\nack:1\n%s\n%s\0RECEIPT\nreceipt-id:1-1\n\n\0" % (length, body)

    found = [
        frame
        for start in range(0, len(data), size)
        for frame in parser.feed(data[start : start + size])
    ]

    long, after = found
    assert isinstance(long, Frame)
    assert long.headers["ack"] == "1"
    assert "more than is accepted" in str(long.problem)
    assert body.startswith(long.body)
    assert len(long.body) == 1 << 16
    assert long.cut
    assert after == Receipt(b"1-1")


def test_a_body_without_a_length_or_an_end_does_not_fill_the_memory() -> None:
    parser, packet = FrameParser(max_body=1 << 20), b"x" * (1 << 16)

    parser.feed(b"MESSAGE\nack:1\n\n")
    tracemalloc.start()
    try:
        for _ in range(500):
            parser.feed(packet)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 1 << 24


def test_a_nul_in_a_header_hides_no_frame_behind_it() -> None:
    message = b"MESSAGE\nack:1\nkey:a\0b\ncontent-length:3\n\n\0\n\0\0"

    first, second = FrameParser().feed(message * 2)

    assert first == second
    assert isinstance(first, Frame)
    assert first.body == b"\0\n\0"
    assert first.headers["key"] == "a\ufffdb"


def test_the_first_of_a_repeated_header_counts() -> None:
    (frame,) = FrameParser().feed(b"MESSAGE\na:first\na:second\n\n\x00")

    assert frame == Frame("MESSAGE", {"a": "first"})


def test_connected_is_not_unescaped() -> None:
    (frame,) = FrameParser().feed(b"CONNECTED\nserver:a\\nb\n\n\x00")

    assert isinstance(frame, Frame)
    assert frame.headers == {"server": "a\\nb"}


def test_a_long_body_without_a_length_is_not_searched_again_for_each_packet() -> None:
    parser, packet = FrameParser(), b"x" * 1000

    parser.feed(b"MESSAGE\nack:1\n\n")
    for _ in range(2000):
        assert parser.feed(packet) == []
    (frame,) = parser.feed(b"\x00")

    assert isinstance(frame, Frame)
    assert len(frame.body) == 2_000_000


@given(name=ANY_TEXT.filter(bool), value=ANY_TEXT)
def test_no_header_can_become_another_header_or_frame(name: str, value: str) -> None:
    lines = header_lines([(name, value)])

    assert lines.count(b"\n") == 1
    assert lines.endswith(b"\n")
    assert lines.count(b":") == 1
    assert b"\x00" not in lines
    assert b"\r" not in lines


@pytest.mark.parametrize(
    ("name", "value"),
    [("a\0", "b"), ("a", "b\0c"), ("", "b"), ("a", "\ud800"), ("a", 1), (None, "b")],
)
def test_a_header_stomp_cannot_carry_is_refused(name: str, value: str) -> None:
    with pytest.raises(MessageFormatError):
        header_lines([("first", "1"), (name, value)])


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b"])
def test_a_credential_cannot_inject_a_connect_header(value: str) -> None:
    with pytest.raises(ValueError, match="passcode"):
        encode_connect({"login": "me", "passcode": value})
