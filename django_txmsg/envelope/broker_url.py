"""The parts of a broker's URL, which may list several hosts.

Used by every reader of a URL of `TXMSG["BROKERS"]`, before hop 4. It checks nothing
but the brackets: what the parts mean is the broker's business.
"""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit

#: Options in a URL's query that are secret.
_SECRET = re.compile(r"((?:password|passcode|secret|token)=)[^&#]*", re.IGNORECASE)


class BrokerUrl(str):
    """A broker's URL that does not show its password where values are shown: on
    Django's debug page, in mails of errors, in `diffsettings`. It is a string as any
    other, password included, to its users."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(without_password(self))


def without_password(url: str) -> str:
    """Return the URL with asterisks for what is secret in it."""
    scheme, separator, rest = url.partition("://")
    credentials, at, hosts = rest.rpartition("@")
    user, colon, _ = credentials.partition(":")
    shown = _SECRET.sub(r"\1***", f"{user}{':***' if colon else ''}{at}{hosts}")
    return f"{scheme}{separator}{shown}"


def split_url(url: str) -> SplitResult:
    """Return the parts of `url`; `netloc` is the whole list of hosts.

    Raises ValueError for brackets that do not match.
    """
    scheme, separator, rest = url.partition("://")
    hosts = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if hosts.count("[") != hosts.count("]"):
        raise ValueError("an IPv6 address is not closed")
    # Without the hosts: urlsplit refuses two IPv6 addresses as one malformed one.
    parts = urlsplit(f"{scheme}{separator}{rest[len(hosts) :]}")
    return parts._replace(netloc=hosts)
