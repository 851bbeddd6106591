"""Parses a broker's URL, which may list several hosts.

All code that reads a URL from `TXMSG["BROKERS"]` uses this module. The module only
checks the form of the URL. Each broker class validates the parts.
"""

from __future__ import annotations

import difflib
import re
import ssl
from collections.abc import Collection
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

#: Options of a URL's query that are secret.
_SECRET = re.compile(r"((?:password|passcode|secret|token)=)[^&#]*", re.IGNORECASE)


class BrokerUrl(str):
    """A broker's URL as a string whose `repr()` hides the password. Django's debug
    page, error mails and `diffsettings` display the `repr()`. All other uses get the
    whole string with the password."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(without_password(self))


def without_password(url: str) -> str:
    """Return the URL with asterisks in place of its secrets."""
    scheme, separator, rest = url.partition("://")
    credentials, at, hosts = rest.rpartition("@")
    user, colon, _ = credentials.partition(":")
    shown = _SECRET.sub(r"\1***", f"{user}{':***' if colon else ''}{at}{hosts}")
    return f"{scheme}{separator}{shown}"


def split_url(url: str) -> SplitResult:
    """Return the parts of `url`. The part `netloc` is the whole list of hosts.

    Raises ValueError if brackets do not match.
    """
    scheme, separator, rest = url.partition("://")
    hosts = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if hosts.count("[") != hosts.count("]"):
        raise ValueError("an IPv6 address is not closed")
    # Without the hosts: urlsplit refuses two IPv6 addresses as one malformed address.
    parts = urlsplit(f"{scheme}{separator}{rest[len(hosts) :]}")
    return parts._replace(netloc=hosts)


def _read_query(parts: SplitResult) -> dict[str, str]:
    """Return the options of a URL's query. Raises ValueError if the query is malformed.
    A password with an unencoded "/", "?", "#" or "&" may end up in the query, so the
    error's text contains no part of the query."""
    behind = parts.path + parts.fragment
    if "@" not in parts.netloc:
        behind += parts.query
    if "@" in behind:
        raise ValueError(
            'it has an "@" after its hosts: percent-encode special characters, '
            "as in a password"
        )
    try:
        return dict(
            parse_qsl(
                parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)
            )
        )
    except ValueError:
        raise ValueError("its query is not NAME=VALUE&NAME=VALUE") from None


def read_url(url: str) -> tuple[SplitResult, dict[str, str]]:
    """Return the parts of a URL, and the options of its query. Raises ValueError for a
    malformed URL. The error's text contains no secret."""
    try:
        parts = split_url(url)
        return parts, _read_query(parts)
    except ValueError as error:
        shown = without_password(url)
        raise ValueError(f"{shown} is not a broker URL: {error}") from None


def check_option(name: str, known: Collection[str]) -> None:
    """Raise ValueError for an unknown option. The error suggests the most similar known
    option."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"Unknown broker option {name!r}.{hint}")


def hurry(url: str, timeout: float) -> str:
    """Add short time-outs to a URL, except those that the URL sets already. The time to
    connect is divided among the hosts, so that a silent host leaves time for the next
    host."""
    parts = split_url(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    limits = {
        "connect_timeout": timeout / len(parts.netloc.split(",")),
        "send_timeout": timeout,
        "close_timeout": timeout,
    }
    more = [
        f"{name}={limit:g}" for name, limit in limits.items() if name not in options
    ]
    return parts._replace(query="&".join(filter(None, [parts.query, *more]))).geturl()


def read_address(text: str, default_port: int) -> tuple[str, int]:
    """Return the host name and the port of one host in a URL. Raises ValueError if the
    text is not a host and port."""
    host, bracket, port = text.rpartition("]")
    if bracket:
        host, port = host.removeprefix("["), port.removeprefix(":")
    elif text.count(":") > 1:
        raise ValueError(f"Write an IPv6 address in brackets: [{text}].")
    else:
        host, _, port = text.partition(":")
    if not host or (
        port and not (port.isascii() and port.isdigit() and int(port) < 65536)
    ):
        raise ValueError(f"{text!r} is not a host and port.")
    return unquote(host), int(port) if port else default_port


def tls_context(
    ca: str | None, cert: str | None, key: str | None, key_password: str | None
) -> ssl.SSLContext:
    """Return a TLS context that always verifies the broker's certificate and host name.
    Raises OSError or ssl.SSLError if a file cannot be read."""
    context = ssl.create_default_context(cafile=ca)
    if cert is not None:
        # Without a password OpenSSL would prompt for one on the terminal.
        context.load_cert_chain(cert, key, key_password or "")
    return context
