"""Calls a webhook with alerts: one POST of JSON, tried a few times.

The URL usually contains a secret, so it comes from the environment, and log lines and
errors show only its host. The server's certificate is verified, and redirections are
not followed. The app and the pipeline send their alerts this way.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import json
import os
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

#: The default environment variable with the URL.
VARIABLE = "TXMSG_WEBHOOK_URL"
#: The environment variable with the key that signs the calls; without it, they are not
#: signed.
KEY_VARIABLE = "TXMSG_WEBHOOK_SECRET"
#: The header with the signature: the hexadecimal HMAC-SHA256 of "TIME.BODY", where TIME
#: is the number of seconds since 1970.
SIGNATURE = "Txmsg-Signature"
#: Seconds that an attempt may take, and seconds between two attempts.
TIMEOUT = 10.0
PAUSES = (1.0, 3.0)


class NoWebhook(ValueError):
    """The environment does not contain a valid URL of a webhook."""


def alert_message(
    service: str,
    name: str,
    *,
    firing: bool,
    since: dt.datetime | None,
    summary: str,
    **facts: Any,
) -> dict[str, Any]:
    """Return the message about the start or the end of an alert. Both messages of an
    alert have the same id."""
    began = since.astimezone(dt.timezone.utc).isoformat() if since else ""
    place, status = f"{service}/{name}", "firing" if firing else "resolved"
    return {
        "version": 1,
        "id": hashlib.sha256(f"{place} {began}".encode()).hexdigest()[:32],
        "fingerprint": place,
        "status": status,
        "service": service,
        "alert": name,
        "since": began,
        "at": dt.datetime.now(dt.timezone.utc).isoformat(),
        "summary": summary,
        "text": f"[{status}] {place}: {summary}",
        **facts,
    }


class Webhook:
    """The receiver of alerts. `error` is the reason why the last alert was not
    accepted."""

    def __init__(
        self, url: str, *, timeout: float = TIMEOUT, key: str | None = None
    ) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port, parts = None, None, urlsplit("")
        if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc:
            raise NoWebhook(
                "The webhook's address is not understood. It is an http:// or https:// "
                "URL without a user."
            )
        self.shown = f"{parts.scheme}://{host}" + (f":{port}" if port else "")
        self._url, self._timeout, self._key = url, timeout, key
        self._opener = urllib.request.build_opener(_NoRedirection, _Handler)
        self.error = ""

    @classmethod
    def from_environment(cls, name: str) -> Webhook | None:
        """Return the webhook at the URL in this environment variable, or None if the
        default variable is unset. Raises NoWebhook if the name is invalid, the named
        variable is unset, or its URL is malformed."""
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise NoWebhook(
                "The webhook's setting takes the name of the environment variable that "
                "holds its address, not the address itself."
            )
        url = os.environ.get(name, "").strip()
        if not url and name != VARIABLE:
            raise NoWebhook(f"The environment variable {name} is not set.")
        key = os.environ.get(KEY_VARIABLE)
        return cls(url, key=key) if url else None

    def post(self, message: Mapping[str, Any], stop: threading.Event) -> bool:
        """Send a message, and return whether it was accepted. Retries failures that may
        be temporary, until `stop` is set."""
        body = json.dumps(message).encode()
        for pause in (*PAUSES, None):
            if stop.is_set():
                return False
            again = self._post(body)
            if not self.error:
                return True
            if not again or pause is None or stop.wait(pause):
                break
        return False

    def _post(self, body: bytes) -> bool:
        """Post once. Returns true if the post failed and another try may succeed."""
        headers = {"Content-Type": "application/json", "User-Agent": "django_txmsg"}
        if self._key:
            now = int(time.time())
            signed = b"%d.%b" % (now, body)
            digest = hmac.new(self._key.encode(), signed, hashlib.sha256).hexdigest()
            headers[SIGNATURE] = f"t={now},v1={digest}"
        request = urllib.request.Request(  # noqa: S310 - http or https, see above
            self._url, data=body, method="POST", headers=headers
        )
        started = time.monotonic()
        try:
            # It has been accepted; the content of the response does not matter.
            self._opener.open(request, timeout=self._timeout).close()
        except urllib.error.HTTPError as error:
            error.close()
            self.error = f"{self.shown} answered {error.code}"
            return error.code >= 500 or error.code in (408, 425, 429)
        except Exception as error:  # such as RuntimeError: no thread can be started
            # Its text may contain the URL.
            reason = getattr(error, "reason", error)
            why = getattr(reason, "strerror", None) or type(reason).__name__
            late = time.monotonic() - started >= self._timeout
            if late or isinstance(reason, TimeoutError):
                why = "timed out"
            if isinstance(reason, ssl.SSLCertVerificationError):
                why = f"its certificate is refused: {reason.verify_message}"
            self.error = f"{self.shown} cannot be reached: {why}"
            return not isinstance(reason, ssl.SSLCertVerificationError)
        self.error = ""
        return False


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Follows no redirections."""

    def redirect_request(self, *_: Any) -> None:
        """Treat a redirection as a failure."""


class _Connection(HTTPConnection):
    """A connection that is closed after its time-out. The socket's own time-out would
    begin again with each received byte."""

    def connect(self) -> None:
        super().connect()
        timer = threading.Timer(self.timeout or TIMEOUT, _cut, (self.sock,))
        timer.daemon = True
        timer.start()


class _SecureConnection(_Connection, HTTPSConnection):
    """Such a connection with TLS."""


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):  # closed long ago
        # Not connection.shutdown(), which ends TLS before it ends the connection:
        # another thread's write at that moment would leave without encryption.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Opens such connections."""

    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_Connection, req)

    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        trust = ssl.create_default_context()
        return self.do_open(_SecureConnection, req, context=trust)
