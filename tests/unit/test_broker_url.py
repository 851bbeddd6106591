"""A broker's URL may list hosts, IPv6 addresses among them, on every Python."""

from __future__ import annotations

import pytest

from django_txmsg.broker_url import split_url


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("database://", ("database", "", "", "")),
        ("database://other?lease=3", ("database", "other", "", "lease=3")),
        ("stomp://u:p@h1,h2:2/x", ("stomp", "u:p@h1,h2:2", "/x", "")),
        ("stomp+ssl://[::1]:5?vhost=/", ("stomp+ssl", "[::1]:5", "", "vhost=/")),
        # Newer releases of Python refuse this to urllib.parse.urlsplit.
        ("stomp://[::1],[fe80::2]:7?a=b", ("stomp", "[::1],[fe80::2]:7", "", "a=b")),
        ("stomp://h,[::1]#x", ("stomp", "h,[::1]", "", "")),
        ("nonsense", ("", "", "nonsense", "")),
    ],
)
def test_the_parts_of_a_url(url: str, parts: tuple[str, str, str, str]) -> None:
    split = split_url(url)

    assert (split.scheme, split.netloc, split.path, split.query) == parts
    assert split.geturl() == url or url == "database://"


@pytest.mark.parametrize("url", ["stomp://[::1", "stomp://u:p@h]:1?x=[", "stomp://]"])
def test_brackets_that_do_not_match_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not closed"):
        split_url(url)
