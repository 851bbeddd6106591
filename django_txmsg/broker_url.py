"""The parts of a broker's URL, which may list several hosts.

Read by whoever looks at a URL of `TXMSG["BROKERS"]`, before hop 4. It checks nothing
but the brackets: what the parts mean is the broker's business.
"""

from __future__ import annotations

import re
from urllib.parse import SplitResult, urlsplit


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
