"""Parses a broker's URL, which may list several hosts, and the options in its query.

All code that reads a URL from `TXMSG["BROKERS"]` uses this module. Each broker class
validates the parts that only its own URLs have.
"""

from __future__ import annotations

import difflib
import re
import socket
import ssl
import time
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ..errors import MAX_SECONDS

#: Numbers that may be 0. All others must be more.
_MAY_BE_ZERO = frozenset({"heartbeat", "give_up_after_timeouts"})
#: Options of a URL's query that are secret.
_SECRET = re.compile(
    r"((?:password|passcode|secret|token|accesskey)=)[^&#]*", re.IGNORECASE
)


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
    if not separator:
        scheme, rest = "", url
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


def _read_address(text: str, default_port: int) -> tuple[str, int]:
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


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """The options of a connection to a server, for each protocol. Each option can also
    be set in the URL's query, except `tls`."""

    #: Seconds to connect and log in to one host.
    connect_timeout: float = 10.0
    #: Seconds until a send or request without an answer counts as outcome unknown.
    send_timeout: float = 30.0
    #: Seconds to wait for the answer to a close.
    close_timeout: float = 5.0
    #: Most bytes of one session's sends without an outcome before the next one waits.
    max_in_flight_bytes: int = 16 * 1024 * 1024
    #: File of the certificate authority to trust, instead of the system's.
    ca: str | None = None
    #: File of the client's certificate, and of its key when not in the same file.
    cert: str | None = None
    key: str | None = None
    #: Password of the key, if it is encrypted.
    key_password: str | None = field(default=None, repr=False)
    #: Created from the scheme and the three files.
    tls: ssl.SSLContext | None = field(default=None, repr=False, compare=False)

    def with_tls(self) -> Any:
        """Return these options with a TLS context that always verifies the broker's
        certificate and host name. If the options have a context already, return them
        unchanged. Raises OSError or ssl.SSLError if a file cannot be read."""
        if self.tls is not None:
            return self
        context = ssl.create_default_context(cafile=self.ca)
        if self.cert is not None:
            # Without a password OpenSSL would prompt for one on the terminal.
            context.load_cert_chain(self.cert, self.key, self.key_password or "")
        return replace(self, tls=context)


def connect(
    address: tuple[str, int], options: ConnectionOptions, give_up: float
) -> socket.socket:
    """Connect to a host, and start TLS if the options have a TLS context. Raises
    OSError.

    The IP addresses of the host share the time that is left, so that a silent address
    leaves time for the next address. `give_up` is the monotonic time at which the login
    must end.
    """
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    raw = _first_connection(found, give_up)
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if options.tls is None:
            return raw
        raw.settimeout(max(0.01, give_up - time.monotonic()))
        return options.tls.wrap_socket(raw, server_hostname=address[0])
    except BaseException:
        raw.close()
        raise


def _first_connection(found: list[Any], give_up: float) -> socket.socket:
    """Connect to the first of these addresses that accepts. Raises OSError."""
    failed = OSError("the host has no address")
    for place, (family, kind, protocol, _, at) in enumerate(found):
        left = max(0.01, give_up - time.monotonic())
        try:
            raw = socket.socket(family, kind, protocol)
        except OSError as error:  # the system has no IPv6, say
            failed = error
            continue
        try:
            raw.settimeout(left / (len(found) - place))
            raw.connect(at)
        except OSError as error:
            raw.close()
            failed = error
        else:
            return raw
    raise failed


Options = TypeVar("Options", bound=ConnectionOptions)


def read_connection(
    url: str, kind: type[Options], ports: Mapping[str, int], given: Mapping[str, Any]
) -> tuple[Options, list[tuple[str, int]]]:
    """Return the options and the addresses of a URL. `ports` has the default port of
    each scheme, the scheme without TLS first. The options in `given` override the
    options in the URL's query.

    Raises ValueError for an unknown scheme, a malformed URL or an unknown option, and
    OSError or ssl.SSLError if a certificate file cannot be read.
    """
    parts, query = read_url(url)
    plain, encrypted = ports
    if parts.scheme not in ports:
        raise ValueError(
            f"{without_password(url)} is not a broker URL: it starts with "
            f"{plain}:// or {encrypted}://."
        )
    credentials, _, hosts = parts.netloc.rpartition("@")
    user, colon, password = credentials.partition(":")
    login = {"user": unquote(user)} if credentials else {}
    if colon:
        login["password"] = unquote(password)
    options = _read_options(kind, {**login, **query}, given)
    if parts.scheme == encrypted:
        options = options.with_tls()
    elif options.ca or options.cert:
        article = "an" if encrypted.startswith("a") else "a"
        raise ValueError(f"ca and cert need {article} {encrypted}:// URL.")
    port = ports[parts.scheme]
    return options, [_read_address(host, port) for host in hosts.split(",")]


def _read_options(
    kind: type[Options], written: Mapping[str, str], given: Mapping[str, Any]
) -> Options:
    hints = typing.get_type_hints(kind)
    known = {one.name: hints[one.name] for one in fields(kind)}
    if "tls" not in given:
        del known["tls"]
    read: dict[str, Any] = {}
    for name, value in {**written, **given}.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            more = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"Unknown broker option {name!r}.{more}")
        try:
            read[name] = _value(known[name], value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Broker option {name}={value!r} is wrong: {error}"
            ) from None
    options = kind(**read)
    for name, hint in known.items():
        if hint not in (int, float):
            continue
        number, zero = getattr(options, name), name in _MAY_BE_ZERO
        if not (number > 0 or (number == 0 and zero)):
            low = "not be negative" if zero else "be more than 0"
            raise ValueError(f"Broker option {name} must {low}.")
        most = MAX_SECONDS if hint is float else 2**40  # AMQP's heartbeat has 16 bits
        if number > (65535 if name == "heartbeat" else most):
            raise ValueError(f"Broker option {name} is too large.")
    return options


def _value(hint: Any, value: Any) -> Any:
    words = ("yes", "no") if hint is bool else typing.get_args(hint)
    if value not in words and (hint is bool or typing.get_origin(hint) is Literal):
        raise ValueError(f"it is {' or '.join(words)}.")
    if hint is bool:
        return value == "yes"
    if hint in (int, float) or (isinstance(hint, type) and issubclass(hint, Enum)):
        return hint(value)
    return value
