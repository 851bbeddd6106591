"""The specification of a job: plain dataclasses that can be converted to JSON without
secrets.

`manage.py pipeline` creates it from Django's settings. Elsewhere it is a file. It
contains the name of the environment variable with a password, never the password
itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from .errors import EnvironmentFault, UsageError

#: PostgreSQL's settings for our sessions. If the application holds a row's lock for
#: longer, the run fails instead of waiting. JIT compilation costs a batch more than it
#: gains: 0.2 s of the 0.6 s that reading 100,000 rows takes. Time-outs meant for the
#: application's sessions do not apply.
SESSION = (
    "-c lock_timeout=60s -c timezone=UTC -c jit=off -c statement_timeout=0"
    " -c idle_in_transaction_session_timeout=0 -c idle_session_timeout=0"
    # If our machine vanishes, the server releases our locks after two minutes.
    " -c tcp_keepalives_idle=60 -c tcp_keepalives_interval=10"
    " -c tcp_keepalives_count=6"
)
#: libpq's parameters with which a session notices within two minutes that the server's
#: machine has vanished. The address may contain others.
_NETWORK: dict[str, Any] = {
    "connect_timeout": 10, "keepalives_idle": 60, "keepalives_interval": 10,
    "keepalives_count": 6, "tcp_user_timeout": 60_000,
}  # fmt: skip


#: Known names of storage options with secrets.
_SECRET = re.compile(r"secret|password|token|credential|key(?!_id)|sas", re.IGNORECASE)


def hidden(text: str) -> str:
    """Return a text in which the passwords of all addresses are hidden."""
    # A password may contain an unencoded @ or slash; a host cannot.
    text = re.sub(r"(\w://[^\s:/@'\"]*):[^\s'\"]*@", r"\1@", text)
    return re.sub(r"(\w://[^\s?'\"]*)\?[^\s'\"]*password=[^\s'\"]*", r"\1", text)


def without_password(url: str) -> str:
    """Return the address of a database without its password, which may contain quotes
    and blanks."""
    url = re.sub(r"^(\w+://[^:/@]*):[^/]*@", r"\1@", url)
    return hidden(re.sub(r"\?.*password=.*", "", url, flags=re.DOTALL))


def digest(value: str) -> str:
    """Return a digest of a value. Run records contain the digest instead of the
    value."""
    return "sha256:" + hashlib.sha256(value.encode()).hexdigest()[:16]


#: The columns by which a condition may name a person, and a text in SQL.
_PERSONAL = re.compile(r"\b(key|correlation_id|headers|body)\b", re.IGNORECASE)
_TEXT = re.compile(r"""(['"])((?:\\.|(?!\1).)*)\1""", re.DOTALL)


def recordable(condition: str) -> str:
    """Return a condition as it may be stored in a run record. If the condition uses a
    column that may identify a person, its text literals are replaced by digests."""
    if not _PERSONAL.search(condition):
        return condition
    return _TEXT.sub(lambda text: f"'{digest(text[2])}'", condition)


def password_variable(service: str) -> str:
    """Return the name of the environment variable with a service's password."""
    return "TXMSG_PASSWORD_" + re.sub(r"\W", "_", service).upper()


@dataclass(frozen=True)
class SourceSpec:
    """A service and the database with its message log.

    `url` is `postgresql://user@host:5432/name` or `sqlite:////absolute/path`.
    """

    service: str
    url: str = field(repr=False)
    password_env: str = ""
    #: Set on the driver by `resolved()`, for tasks; never written anywhere.
    password: str | None = field(default=None, repr=False)
    #: A replica for jobs that only read.
    reader_url: str = field(default="", repr=False)
    reader_password_env: str = ""

    @property
    def vendor(self) -> str:
        """`postgresql` or `sqlite`."""
        scheme = urlsplit(self.url).scheme
        if scheme in ("postgresql", "postgres"):
            return "postgresql"
        if scheme == "sqlite":
            return "sqlite"
        raise UsageError(
            f"The database of service {self.service!r} is at {self.shown}: the "
            "pipeline reads postgresql:// and sqlite:// databases."
        )

    @property
    def path(self) -> str:
        """The path of an SQLite database file."""
        return unquote(urlsplit(self.url).path)[1:]

    @property
    def shown(self) -> str:
        """The address without the password, for messages and run records."""
        return without_password(self.url)

    def reading(self) -> SourceSpec:
        """Return the source to read from: the replica if there is one, otherwise this
        source."""
        if not self.reader_url:
            return self
        return SourceSpec(self.service, self.reader_url, self.reader_password_env)

    def public(self) -> SourceSpec:
        """Return this source without the password. If the address contained a password,
        the result names the environment variable that must contain it."""
        shown, named = self.shown, self.password_env
        if shown != self.url and not named:
            named = password_variable(self.service)
        reader, its = without_password(self.reader_url), self.reader_password_env
        if reader != self.reader_url and not its:
            its = password_variable(f"{self.service}_reader")
        return dataclasses.replace(
            self, url=shown, password_env=named, password=None, reader_url=reader,
            reader_password_env=its,
        )  # fmt: skip

    def conninfo(self) -> str:
        """Return the libpq address with the password.

        Raises EnvironmentFault if the environment variable with the password is not
        set.
        """
        from psycopg.conninfo import conninfo_to_dict, make_conninfo

        known = _NETWORK | conninfo_to_dict(self.url)
        known["options"] = f"{known.get('options') or ''} {SESSION}".strip()
        if (password := self.resolved().password) is not None:
            known["password"] = password
        return make_conninfo("", **known)

    def resolved(self) -> SourceSpec:
        """Return this source with its password, for a task that runs with another
        environment."""
        if not self.password_env or self.password is not None:
            return self
        password = os.environ.get(self.password_env)
        if password is None:
            raise EnvironmentFault(
                f"The password of service {self.service!r} is expected in the "
                f"environment variable {self.password_env}, which was not set when "
                "Spark was started."
            )
        return dataclasses.replace(self, password=password)


@dataclass(frozen=True)
class LakeSpec:
    """The address of the lake, and how it stores rows."""

    uri: str = field(repr=False)
    keep_bodies: bool = True
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Former names of services that have archived, each with the present name.
    former: Mapping[str, str] = field(default_factory=dict)

    def public(self) -> LakeSpec:
        """Return this specification without secrets. The clients of object stores can
        read secrets from the environment."""
        options = {
            name: value
            for name, value in self.storage_options.items()
            if not _SECRET.search(name)
        }
        return dataclasses.replace(self, uri=hidden(self.uri), storage_options=options)


@dataclass(frozen=True)
class Subscription:
    """A stage that is expected to receive all messages to a destination."""

    destination: str
    service: str
    stage: str


_PARTS: dict[str, Any] = {
    "services": SourceSpec, "queues": SourceSpec, "subscriptions": Subscription,
}  # fmt: skip


@dataclass(frozen=True)
class JobSpec:
    """Everything that a job needs to know about the services and the lake.

    Jobs use the first service by default. `retention` maps a table to the number of
    days for which its settled rows stay in the database.
    """

    services: tuple[SourceSpec, ...] = ()
    lake: LakeSpec | None = None
    retention: Mapping[str, float | None] = field(default_factory=dict)
    #: All stages of the services that declare theirs here.
    subscriptions: tuple[Subscription, ...] = ()
    #: Patterns of what keeps no log: destinations, SERVICE/STAGE or `broker:ALIAS`, and
    #: senders.
    external: tuple[str, ...] = ()
    external_senders: tuple[str, ...] = ()
    #: Seconds by a pattern of destinations; `*` is for all others.
    late_after: Mapping[str, float] = field(default_factory=dict)
    stuck_after: float | None = None
    #: Services, and aliases of their brokers that are Celery's.
    task_brokers: tuple[tuple[str, str], ...] = ()
    #: Further databases in which embedded brokers keep their queues. Only `erase` reads
    #: them, because their other tables may belong to other services.
    queues: tuple[SourceSpec, ...] = ()

    def service(self) -> SourceSpec:
        """Return the first service. Raises UsageError if there is none."""
        if not self.services:
            raise UsageError("No service is specified: give --service NAME=URL.")
        return self.services[0]

    def lake_spec(self) -> LakeSpec:
        """Return the lake's specification. Raises UsageError if there is none."""
        if self.lake is None:
            raise UsageError(
                'No lake is specified. Set TXMSG["LAKE"], or "lake" in the job '
                "specification, or pass --lake, for example file:///var/lake."
            )
        return self.lake

    @property
    def former(self) -> Mapping[str, str]:
        """Present names of services by their former ones."""
        return {} if self.lake is None else self.lake.former

    def former_names(self) -> list[str]:
        """Return the former names of the first service."""
        own = self.service().service
        return [old for old, present in self.former.items() if present == own]

    def public(self) -> JobSpec:
        """Return this specification without secrets."""
        return dataclasses.replace(
            self,
            services=tuple(one.public() for one in self.services),
            queues=tuple(one.public() for one in self.queues),
            lake=None if self.lake is None else self.lake.public(),
        )

    def to_json(self) -> str:
        """Return this specification as JSON, without secrets."""
        plain = dataclasses.asdict(self.public())
        for source in (*plain["services"], *plain["queues"]):
            del source["password"]
        return json.dumps(plain, indent=2)

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        """Parse a specification from JSON. Raises UsageError if it is invalid."""
        try:
            given = json.loads(text)
            for name, kind in _PARTS.items():
                given[name] = [kind(**one) for one in given.get(name, ())]
            lake = given.get("lake")
            given["lake"] = LakeSpec(**lake) if lake else None
            given["task_brokers"] = list(map(tuple, given.get("task_brokers", ())))
            lists = {n: tuple(one) for n, one in given.items() if isinstance(one, list)}
            return cls(**given | lists)
        except (TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"The job specification does not parse: {error}"
            ) from error

    @classmethod
    def load(cls, path: str) -> JobSpec:
        """Load a specification. `path` is the path of a JSON file, or the JSON itself.
        Raises UsageError if it is invalid."""
        if path.lstrip().startswith("{"):
            return cls.from_json(path)
        try:
            return cls.from_json(Path(path).read_text())
        except OSError as error:
            raise UsageError(
                f"The job specification cannot be read: {error}. If the driver runs in "
                "the cluster (--deploy-mode cluster), bring it there: --files job.json "
                '--spec job.json on YARN, or --spec "$(cat job.json)".'
            ) from error
