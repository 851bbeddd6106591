"""A real JMS client. A small program uses the ActiveMQ client of Debian."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .activemq import ActiveMQ
from .stomp_server import PASSWORD, USER

JARS = Path("/usr/share/java")
NEEDED = ("activemq-client", "geronimo-jms_1.1_spec",
          "geronimo-j2ee-management-1.1-spec", "hawtbuf", "slf4j-api",
          "slf4j-nop")  # fmt: skip
PROGRAM = Path(__file__).with_name("JmsPeer.java")
#: It lives for a second: compiling well does not pay.
JAVA = ("java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


def missing() -> str | None:
    """Return why no JMS client is available, or None if there is one."""
    absent = [name for name in NEEDED if not (JARS / f"{name}.jar").exists()]
    if shutil.which("javac") is None:
        absent.append("javac")
    if not absent:
        return None
    return (
        f"{', '.join(absent)} not found: apt-get install openjdk-17-jdk-headless "
        f"libactivemq-java libslf4j-java"
    )


@dataclass(frozen=True)
class Received:
    """A message as Java received it. `kind` is "text" or "bytes"."""

    kind: str
    body: bytes
    properties: dict[str, str]


class JmsPeer:
    """A Java client that sends to a queue or receives from one."""

    def __init__(self, server: ActiveMQ, classes: Path) -> None:
        self._server = server
        jars = [str(JARS / f"{name}.jar") for name in NEEDED]
        self._path = ":".join([*jars, str(classes)])
        self._run(["javac"], "-nowarn", "-d", str(classes), str(PROGRAM))

    def send(self, queue: str, text: str, **properties: str) -> None:
        """Send a TextMessage."""
        given = [f"{name}={_encoded(value)}" for name, value in properties.items()]
        self._run(JAVA, "JmsPeer", "send", queue, _encoded(text), *given)

    def receive(
        self, queue: str, count: int = 1, selector: str | None = None
    ) -> list[Received]:
        """Receive `count` messages. With a `selector`, receive only messages that match
        it."""
        chosen = [] if selector is None else [_encoded(selector)]
        said = self._run(JAVA, "JmsPeer", "receive", queue, str(count), *chosen)
        return [_received(line) for line in said.splitlines()]

    def _run(self, program: Sequence[str], *arguments: str) -> str:
        done = subprocess.run(
            [*program, "-cp", self._path, *arguments],
            env={
                **os.environ,
                "JMS_URL": self._server.jms_url,
                "JMS_USER": USER,
                "JMS_PASSWORD": PASSWORD,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def _received(line: str) -> Received:
    kind, body, *properties = line.split(" ")
    pairs = (one.partition("=")[::2] for one in properties)
    return Received(
        kind,
        base64.b64decode(body),
        {name: base64.b64decode(value).decode() for name, value in pairs},
    )


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
