"""RabbitMQ with its STOMP plugin, as a separate node for the tests."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
from pathlib import Path

from .keeper import KEEPER
from .root import Root
from .server import free_port
from .stomp_server import (
    ALLOWED,
    LIMITED_USER,
    PASSWORD,
    READER,
    USER,
    StompServer,
    accepts,
)

# Debian's wrapper in sbin changes the user; the program behind it does not.
PROGRAM = "/usr/lib/rabbitmq/bin/rabbitmq-server"
TOOL = "/usr/lib/rabbitmq/bin/rabbitmqctl"

CONFIGURATION = """\
listeners.tcp.1 = 127.0.0.1:{amqp_port}
listeners.ssl.1 = 127.0.0.1:{amqps_port}
stomp.listeners.tcp.1 = 127.0.0.1:{port}
stomp.listeners.ssl.1 = 127.0.0.1:{tls_port}
ssl_options.cacertfile = {authority}
ssl_options.certfile = {certificate}
ssl_options.keyfile = {key}
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = false
load_definitions = {definitions}
disk_free_limit.absolute = 50MB
"""


#: From 4.0 on the STOMP plugin has a limit, which big bodies are above.
SINCE_4 = "stomp.max_frame_size = 67108864\n"


class RabbitMQ(StompServer):
    """One RabbitMQ node with its own port mapper (epmd)."""

    name = "rabbitmq"
    debian_packages = "rabbitmq-server openssl"

    def __init__(self) -> None:
        super().__init__()
        self.amqp_port = free_port()
        self.amqps_port = free_port()
        self.distribution_port = free_port()
        self.epmd_port = free_port()
        self._epmd: subprocess.Popen[bytes] | None = None

    @classmethod
    def programs(cls) -> dict[str, Path | None]:
        return {
            "rabbitmq-server": cls.root().find(PROGRAM),
            "epmd": cls.root().which("epmd"),
            "openssl": Root().which("openssl"),
        }

    @classmethod
    def major(cls) -> int:
        """Return the first number of the node's version."""
        found = cls.root().find("usr/lib/rabbitmq/lib/rabbitmq_server-*")
        return int(found.name.rpartition("-")[2].split(".")[0]) if found else 0

    def prepare(self) -> None:
        (self.directory / "enabled_plugins").write_text("[rabbitmq_stomp].\n")
        (self.directory / "definitions.json").write_text(json.dumps(_definitions()))
        (self.directory / "rabbitmq.conf").write_text(
            (CONFIGURATION + SINCE_4 * (self.major() >= 4)).format(
                amqp_port=self.amqp_port,
                amqps_port=self.amqps_port,
                port=self.port,
                tls_port=self.tls_port,
                authority=self.certificates.authority,
                certificate=self.certificates.certificate,
                key=self.certificates.key,
                definitions=self.directory / "definitions.json",
            )
        )

    def launch(self) -> subprocess.Popen[bytes]:
        if self._epmd is None or self._epmd.poll() is not None:
            # Our own port mapper: the node would start one that outlives it.
            self._epmd = self.spawn(
                ["epmd", "-address", "127.0.0.1", "-port", str(self.epmd_port)]
            )
        return self.spawn([PROGRAM], env=self._environment())

    def ready(self) -> bool:
        # It speaks STOMP before it listens for AMQP, and ends when it cannot.
        return super().ready() and accepts(self.amqp_port) and accepts(self.amqps_port)

    def close_all_connections(self) -> None:
        """Close every connection, as an operator does before maintenance."""
        self.control("close_all_connections", "maintenance")

    def remove(self) -> None:
        super().remove()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait(30)
            KEEPER.forget(self._epmd.pid)

    def control(self, *command: str) -> str:
        """Run `rabbitmqctl` against this node and return what it printed."""
        environment = self._environment()
        node = environment["RABBITMQ_NODENAME"]
        result = self.run([TOOL, "-n", node, *command], env=environment)
        if result.returncode:
            raise RuntimeError(f"rabbitmqctl {command[0]}: {result.stderr}")
        return result.stdout

    def _environment(self) -> dict[str, str]:
        here = self.directory
        return {
            "ERL_EPMD_PORT": str(self.epmd_port),
            "HOME": str(here),
            "RABBITMQ_CONFIG_FILE": str(here / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(here / "none"),
            "RABBITMQ_DIST_PORT": str(self.distribution_port),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(here / "enabled_plugins"),
            "RABBITMQ_LOG_BASE": str(here / "logs"),
            "RABBITMQ_MNESIA_BASE": str(here / "mnesia"),
            "RABBITMQ_NODENAME": f"txmsg{self.port}@localhost",
            "RABBITMQ_NODE_PORT": str(self.amqp_port),
            "RABBITMQ_PID_FILE": str(here / "pid"),
            # Schedulers that spin while idle starve the rest of a small machine.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "+sbwt none +sbwtdcpu none +sbwtdio none"
            ),
        }


def _definitions() -> dict[str, list[dict[str, str]]]:
    """Return the users and their permissions, in RabbitMQ's import format."""
    salt = b"salt"
    digest = hashlib.sha256(salt + PASSWORD.encode()).digest()
    allowed = f"^({ALLOWED.replace('.', '[.]')}.*|amq[.]default)$"
    return {
        "vhosts": [{"name": "/"}],
        "users": [
            {
                "name": name,
                "password_hash": base64.b64encode(salt + digest).decode(),
                "hashing_algorithm": "rabbit_password_hashing_sha256",
                "tags": "",
            }
            for name in (USER, LIMITED_USER, READER)
        ],
        "permissions": [
            {
                "user": name,
                "vhost": "/",
                "configure": names,
                "read": names,
                "write": "^$" if name == READER else names,
            }
            for name, names in ((USER, ".*"), (LIMITED_USER, allowed), (READER, ".*"))
        ],
    }
