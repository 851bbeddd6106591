"""`Idempotency-Key`: a repeated unsafe request is executed once.

The key is stored with the response in the request's own transaction, so the key commits
if and only if the request's effects commit. The status codes follow
draft-ietf-httpapi-idempotency-key-header: 400 for an unusable key, 409 while the first
request runs, 422 for another request under the same key. A stored response is returned
only to the same caller. The caller is a user, an Authorization header, a session, or
what TXMSG["HTTP"]["IDEMPOTENCY_CALLER"] returns.
"""

from __future__ import annotations

import hashlib
import logging
import re
import uuid
from functools import cache
from typing import Any

from django.core.exceptions import RequestDataTooBig
from django.db import IntegrityError, OperationalError, connections
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.request import RawPostDataException
from django.http.response import HttpResponseBase
from django.utils.module_loading import import_string

from .. import conf
from ..models import IdempotencyKey
from ..models.fields import query
from ..runtime import database_health

_log = logging.getLogger("django_txmsg.middleware")

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
#: Header of a response that was stored earlier.
REPLAYED = "Idempotency-Replayed"
#: Headers that belong to one response, not to the result.
_NOT_KEPT = frozenset({"date", "set-cookie", "server", "connection"})
#: Largest body of a response, in bytes, that is stored for a repetition.
MAX_KEPT = 1024 * 1024
#: Responses after which a client may try again (it must log in, wait, or get a
#: permission). The request is rolled back, and its key is free.
RETRIABLE = frozenset({401, 403, 407, 408, 421, 423, 425, 429})
#: A Structured Fields string (RFC 8941), or the bare key, as most clients send it.
_QUOTED = re.compile(r'"((?:[^"\\]|\\["\\])*)"')
_SOUND = re.compile(r"[\x20-\x7e]{1,255}")


def wanted(request: HttpRequest) -> bool:
    """Return whether to handle the request's Idempotency-Key: the request has the
    header, its method is unsafe, and the setting is on."""
    return (
        # All headers are parsed only for the few requests that have this one.
        "HTTP_IDEMPOTENCY_KEY" in request.META
        and request.method not in SAFE_METHODS
        and conf.get().HTTP.IDEMPOTENCY
    )


def impossible() -> HttpResponse:
    """Return the error response to a request that has an Idempotency-Key, but whose
    view runs without an outbox session."""
    return _problem(
        400,
        "Idempotency-Key is not supported here",
        "A repeated request would be executed again. Send it without the header.",
    )


def claim(request: HttpRequest, using: str) -> HttpResponse | None:
    """Reserve the request's key. Call this at the beginning of the request's
    transaction.

    Returns None if the view must run. Otherwise returns the response: the stored
    response, or an error.
    """
    if not wanted(request):
        return None
    key = _read_key(request.headers["Idempotency-Key"])
    if key is None:
        return _problem(
            400,
            "Idempotency-Key is not usable",
            "Send 1 to 255 printable ASCII characters, a UUID for example.",
        )
    caller = _caller(request)
    if caller is None:
        _log_unknown_caller()
        return _problem(
            400,
            "Idempotency-Key needs a caller",
            "It cannot be proved that a repeated request comes from you. Log in, or "
            "send it without the header.",
        )
    try:
        fingerprint = _fingerprint(request)
    except (RequestDataTooBig, RawPostDataException):
        return _problem(
            413,
            "Too large for an Idempotency-Key",
            "The bodies of requests with one key are compared, and this one is too "
            "large for that. Send it without the header, or as multipart/form-data.",
        )
    try:
        if not _alone(using, caller, key):
            return _in_progress()
        keys = IdempotencyKey.objects.using(using)
        stored = keys.filter(caller=caller, key=key).first()
        if stored is None:
            row = keys.create(caller=caller, key=key, fingerprint=fingerprint)
            request._txmsg_idempotency = row  # type: ignore[attr-defined]  # kept on the request
            return None
    except (IntegrityError, OperationalError) as error:
        if not _is_taken(error):
            raise
        return _in_progress()
    if stored.fingerprint != fingerprint:
        return _problem(
            422,
            "Idempotency-Key is already used",
            "It was sent with another request. Use a new key for a new request.",
        )
    return _replay(stored)


def is_free_again(request: HttpRequest, response: HttpResponseBase) -> bool:
    """Return whether this response makes the request roll back. Then the key is not
    stored, and can be used again."""
    claimed = hasattr(request, "_txmsg_idempotency")
    return claimed and response.status_code in RETRIABLE


def keep(
    request: HttpRequest,
    response: HttpResponseBase,
    using: str,
    session_id: uuid.UUID | None,
) -> None:
    """Store the response with its key, before the transaction commits. The row also
    records the session id of the request's messages, so that erasing these messages
    also erases the response."""
    row: IdempotencyKey | None = getattr(request, "_txmsg_idempotency", None)
    if row is None:
        return
    row.status_code = response.status_code
    row.headers = [
        [name, value]
        for name, value in response.items()
        if name.lower() not in _NOT_KEPT
    ]
    if not response.streaming and len(response.content) <= MAX_KEPT:  # type: ignore[attr-defined]  # not streaming
        row.body = bytes(response.content)  # type: ignore[attr-defined]  # not streaming
    row.session_id = session_id
    row.save(
        using=using, update_fields=["status_code", "headers", "body", "session_id"]
    )


def _replay(stored: IdempotencyKey) -> HttpResponse:
    if stored.status_code is None or stored.body is None:
        return _problem(
            409,
            "The request was executed already",
            "Its response was a stream or very large, and was not kept.",
        )
    response = HttpResponse(bytes(stored.body), status=stored.status_code)
    del response["Content-Type"]
    for name, value in stored.headers:
        response[name] = value
    response[REPLAYED] = "true"
    return response


def _alone(using: str, caller: str, key: str) -> bool:
    """Reserve the key until the transaction ends. Returns False if another request with
    this key is running. On SQLite, always returns True: the INSERT that follows fails
    instead."""
    if connections[using].vendor != "postgresql":
        return True
    digest = hashlib.sha256(f"txmsg-idempotency\0{caller}\0{key}".encode()).digest()
    number = int.from_bytes(digest[:8], "big", signed=True)
    ((alone,),) = query(using, "SELECT pg_try_advisory_xact_lock(%s)", [number])
    return bool(alone)


def _is_taken(error: Exception) -> bool:
    """Return True if this error means that another request has reserved the key. Such
    an error is a violation of the unique constraint, a locked SQLite database, or a
    serialization failure of PostgreSQL."""
    if isinstance(error, IntegrityError) or "database is locked" in str(error):
        return True
    return database_health.sqlstate(error) == "40001"


def _read_key(given: str) -> str | None:
    quoted = _QUOTED.fullmatch(given.strip())
    key = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else given.strip()
    if not _SOUND.fullmatch(key) or (quoted is None and '"' in key):
        return None
    return key


def _caller(request: HttpRequest) -> str | None:
    """Return the caller's identity, or None if it is not certain."""
    path = conf.get().HTTP.IDEMPOTENCY_CALLER
    if path is not None:
        named = import_string(path)(request)
        return None if named is None else f"named:{_digest(str(named))}"
    user: Any = getattr(request, "user", None)
    if user is not None and user.is_authenticated:
        return f"user:{user.pk}"
    authorization = request.headers.get("Authorization")
    if authorization:
        return f"authorization:{_digest(authorization)}"
    session: Any = getattr(request, "session", None)
    # The session is loaded, since any cookie yields a session key.
    if session is not None and not session.is_empty() and session.session_key:
        return f"session:{_digest(session.session_key)}"
    return None


@cache
def _log_unknown_caller() -> None:
    """Log once per process that callers cannot be identified. Only the developer can
    change that."""
    _log.warning(
        "A request with an Idempotency-Key was refused, since nothing identifies its "
        'caller. Put something into the sessions of guests, or set TXMSG["HTTP"]'
        '["IDEMPOTENCY_CALLER"]. Further requests like it are not logged.'
    )


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _fingerprint(request: HttpRequest) -> str:
    """Return a hash of what makes two requests the same: method, host, path and
    payload."""
    digest = hashlib.sha256()

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)

    kind = request.headers.get("Content-Type", "").partition(";")[0].strip()
    host, path = request.get_host(), request.get_full_path()
    for text in (request.method or "", host, path, kind):
        add(text.encode())
    if request.content_type != "multipart/form-data":
        add(request.body)
        return digest.hexdigest()
    # A multipart boundary differs each time, and files may not fit into memory.
    for name, values in sorted(request.POST.lists()):
        for value in values:
            add(name.encode())
            add(str(value).encode())
    for name, files in sorted(request.FILES.lists()):
        for file in files:
            add(name.encode())
            add((file.name or "").encode())
            content = hashlib.sha256()
            for chunk in file.chunks():
                content.update(chunk)
            file.seek(0)
            add(content.digest())
    return digest.hexdigest()


def _in_progress() -> HttpResponse:
    response = _problem(
        409,
        "A request with this Idempotency-Key is being executed",
        "Wait for its response, or send it again in a moment.",
    )
    response["Retry-After"] = "1"
    return response


def _problem(status: int, title: str, detail: str) -> HttpResponse:
    """Return a problem report according to RFC 9457."""
    return JsonResponse(
        {"type": "about:blank", "title": title, "status": status, "detail": detail},
        status=status,
        content_type="application/problem+json",
    )
