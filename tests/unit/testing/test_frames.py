"""The scripted broker encodes and decodes frames like the examples in the STOMP
specification."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_txmsg.testing.frames import Decoder, Frame, FrameError, encode

names = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1
)
values = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
frames = st.builds(
    lambda command, headers, body: Frame(
        command,
        {**headers, "content-length": str(len(body))},
        body,
    ),
    st.sampled_from(["SEND", "MESSAGE", "RECEIPT", "ERROR"]),
    st.dictionaries(names.filter(lambda n: n != "content-length"), values, max_size=5),
    st.binary(max_size=200),
)


def test_a_frame_is_written_as_the_specification_shows_it() -> None:
    frame = Frame(
        "SEND", {"destination": "/queue/a", "content-type": "text/plain"}, b"hello"
    )
    written = b"SEND\ndestination:/queue/a\ncontent-type:text/plain\n\nhello\0"
    assert encode(frame) == written


def test_headers_are_escaped() -> None:
    frame, written = Frame("SEND", {"a": "\\b\n:c\r"}), b"SEND\na:\\\\b\\n\\cc\\r\n\n\0"
    assert encode(frame) == written
    assert Decoder().feed(written) == [frame]


def test_connect_is_not_unescaped() -> None:
    [frame] = Decoder().feed(b"CONNECT\npasscode:a\\nb:c\n\n\0")
    assert frame["passcode"] == "a\\nb:c"


def test_lines_may_end_as_on_windows() -> None:
    [frame] = Decoder().feed(b"SEND\r\na:b\r\nc: d \r\n\r\nhello\0")
    assert frame == Frame("SEND", {"a": "b", "c": " d "}, b"hello")


def test_the_first_of_a_repeated_header_counts() -> None:
    [frame] = Decoder().feed(b"SEND\na:1\na:2\n\n\0")
    assert frame["a"] == "1"


def test_a_body_with_nul_needs_its_length() -> None:
    whole = b"SEND\ncontent-length:3\n\n\0x\0\0"
    assert [f.body for f in Decoder().feed(whole)] == [b"\0x\0"]
    with pytest.raises(FrameError):
        Decoder().feed(b"SEND\n\n\0x\0\0")


def test_end_of_lines_between_frames_are_heartbeats() -> None:
    decoder = Decoder()
    found = decoder.feed(b"\n\r\n\nSEND\n\n\0\n\nSEND\n\n\0\n")
    assert [frame.command for frame in found] == ["SEND", "SEND"]
    assert decoder.heartbeats == 6


@pytest.mark.parametrize(
    "wrong",
    [
        b"SEND\na:\\t\n\n\0",  # no such escape
        b"SEND\na:\\",  # an escape cut off by the end of the line
        b"SEND\nno colon\n\n\0",
        b"SEND\na:\xff\n\n\0",  # no UTF-8
        b"SEND\0",  # no end of headers
        b"SEND\ncontent-length:2\n\nabc\0",
        b"SEND\ncontent-length:-1\n\n\0",
        b"SEND\ncontent-length:\xc2\xb2\n\n\0",  # a digit, but no number
    ],
)
def test_invalid_frame_is_refused(wrong: bytes) -> None:
    with pytest.raises(FrameError):
        Decoder().feed(wrong + b"\n\n\0\n\0")


def test_every_split_gives_the_same_frames() -> None:
    data = (
        b"\nSEND\r\na:\xc3\xa4\\n\ncontent-length:5\n\nx\0\n\ny\0\n"
        b"SEND\nlast:1\n\nno length\0\n"
    )
    whole = Decoder().feed(data)
    assert len(whole) == 2
    for border in range(len(data)):
        decoder = Decoder()
        assert decoder.feed(data[:border]) + decoder.feed(data[border:]) == whole
    decoder = Decoder()
    assert [f for byte in data for f in decoder.feed(bytes([byte]))] == whole


@given(st.lists(frames, max_size=4), st.data())
def test_any_frames_survive_any_splits(sent: list[Frame], data: st.DataObject) -> None:
    written = b"\n".join(encode(frame) for frame in sent)
    borders = data.draw(st.lists(st.integers(0, len(written)), max_size=6))
    decoder, found, start = Decoder(), [], 0
    for border in [*sorted(borders), len(written)]:
        found += decoder.feed(written[start:border])
        start = border
    assert found == sent


@given(noise=st.binary(max_size=300))
def test_noise_is_read_or_refused_and_never_breaks(noise: bytes) -> None:
    try:
        Decoder().feed(noise)
    except FrameError:
        return
