"""Telling a web service something: one POST of JSON, tried a few times.

The address holds the secret, as a rule: it comes from the environment, and no text of
ours shows more of it than the host. TLS is verified; no redirection is followed.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from .errors import UsageError

#: Seconds that an attempt may take, and that lie between two.
TIMEOUT = 10.0
PAUSES = (1.0, 3.0)


class Webhook:
    """Where alerts go. `error` is why the last message did not get there; `taken` and
    `failed` count those that did and that did not."""

    def __init__(self, url: str, *, timeout: float = TIMEOUT) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port, parts = None, None, urlsplit("")
        if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc:
            raise UsageError(
                "The webhook's address is not understood. It is an http:// or https:// "
                "URL without a user."
            )
        self.shown = f"{parts.scheme}://{host}" + (f":{port}" if port else "")
        self._url, self._timeout = url, timeout
        self._opener = urllib.request.build_opener(
            _NoRedirection,
            urllib.request.HTTPSHandler(context=ssl.create_default_context()),
        )
        self.error = ""
        self.taken = self.failed = 0

    @classmethod
    def from_environment(cls, name: str) -> Webhook | None:
        """Return the webhook whose address is in an environment variable, if it is
        set. Raises UsageError for what is no such address."""
        url = os.environ.get(name, "").strip()
        return cls(url) if url else None

    def post(self, message: Mapping[str, Any], stop: threading.Event) -> bool:
        """Send a message, and say whether it was taken. Tries again where that may
        help, until `stop` is set."""
        body = json.dumps(message).encode()
        for pause in (*PAUSES, None):
            if stop.is_set():
                return False
            again = self._post(body)
            if not self.error:
                self.taken += 1
                return True
            if not again or pause is None or stop.wait(pause):
                break
        self.failed += 1
        return False

    def _post(self, body: bytes) -> bool:
        """Try once. Returns whether another try may have more luck."""
        request = urllib.request.Request(  # noqa: S310 - http or https, see above
            self._url, data=body, method="POST",
            headers={"Content-Type": "application/json", "User-Agent": "django_txmsg"},
        )  # fmt: skip
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                answer.read(1024)
        except urllib.error.HTTPError as error:
            error.close()
            self.error = f"{self.shown} answered {error.code}"
            return error.code >= 500 or error.code in (408, 425, 429)
        except (OSError, HTTPException, ValueError) as error:
            # Its text may hold the address.
            reason = getattr(error, "reason", error)
            why = getattr(reason, "strerror", None) or type(reason).__name__
            if isinstance(reason, TimeoutError):
                why = "timed out"
            if isinstance(reason, ssl.SSLCertVerificationError):
                why = f"its certificate is refused: {reason.verify_message}"
            self.error = f"{self.shown} cannot be reached: {why}"
            return not isinstance(reason, ssl.SSLCertVerificationError)
        self.error = ""
        return False


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """A message goes where it was addressed to, or nowhere."""

    def redirect_request(self, *_: Any) -> None:
        """Take the redirection as the failure that it is here."""
