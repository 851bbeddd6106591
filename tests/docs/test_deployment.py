"""The tools accept the systemd units, Compose files and manifests of the
documentation."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml  # which myst-parser brings along

from tests.docs.pages import PAGES, ROOT, Block, blocks


def shown(language: str) -> list[Any]:
    """Return the blocks of one language, each named by its page."""
    return [
        pytest.param(one, id=f"{page.stem}-{one.line}")
        for page in PAGES
        for one in blocks(page)
        if one.language == language
    ]


@pytest.mark.parametrize("block", shown("yaml"))
def test_yaml_is_a_manifest_a_compose_file_or_a_part_of_one(block: Block) -> None:
    (found,) = yaml.safe_load_all(block.code)

    assert isinstance(found, dict)
    if "kind" in found:
        assert {"apiVersion", "metadata", "spec"} <= found.keys()
    if found.get("kind") == "Deployment":
        template = found["spec"]["template"]
        labels = found["spec"]["selector"]["matchLabels"]
        assert labels.items() <= template["metadata"]["labels"].items()
        for container in template["spec"]["containers"]:
            assert {"name", "image", "command"} <= container.keys()
            ports = {one["name"] for one in container.get("ports", ())}
            probes = [one for key, one in container.items() if key.endswith("Probe")]
            assert {one["httpGet"]["port"] for one in probes} <= ports
    for service in found.get("services", {}).values():
        assert "image" in service or "build" in service


COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
#: The port that a URL without one means.
PORTS = {"postgres": 5432, "stomp": 61613, "amqp": 5672}


def test_compose_file_has_the_servers_that_contributing_connects_to() -> None:
    """The Compose file has a server for each URL in contributing.md, with the same
    port, user and password. Only the texts are compared, because no Docker runs
    here."""
    page = (ROOT / "docs" / "contributing.md").read_text()
    urls = [urlsplit(one) for one in re.findall(r"TXMSG_TEST_\w+_URL=(\S+)", page)]
    published = {
        int(port.split(":")[1]): service
        for service in COMPOSE.values()
        for port in service["ports"]
    }

    assert len(published) == sum(len(one["ports"]) for one in COMPOSE.values())
    assert all(re.search(r":\d", one["image"]) for one in COMPOSE.values())
    assert all(
        port.startswith("127.0.0.1:")
        for one in COMPOSE.values()
        for port in one["ports"]
    )
    assert len(urls) == 2
    for url in urls:
        server = published[url.port or PORTS[url.scheme]]
        assert {url.username, url.password} <= {*server["environment"].values()}


def test_docker_run_publishes_the_ports_of_the_urls_below_it() -> None:
    page = (ROOT / "docs" / "how-to" / "install.md").read_text()
    commands = re.findall(r"^docker run -d --name (\w+)((?:.*\\\n)*.*)", page, re.M)
    published = {name: re.findall(r"-p (\d+):\1", rest) for name, rest in commands}
    rows = re.findall(
        r"^\| (RabbitMQ|ActiveMQ).*?(\w+)://\S+localhost:(\d+)", page, re.M
    )

    assert len(rows) == 3
    for broker, scheme, port in rows:
        assert port in published[broker.lower()], scheme
        assert int(port) == PORTS[scheme]
    # Both ways to start RabbitMQ enable the plugin by the same command.
    (plugin,) = re.findall(r'"(rabbitmq-plugins .+?)"', page)
    assert plugin in COMPOSE["rabbitmq"]["command"]


@pytest.mark.parametrize("block", shown("ini"))
def test_units_start_a_command_that_is_restarted(block: Block, tmp_path: Path) -> None:
    if "[Service]" not in block.code:
        return
    lines = dict(re.findall(r"^(\w+)=(.+)$", block.code, re.MULTILINE))
    assert " txmsg run" in lines["ExecStart"]
    assert lines["Restart"] == "always"
    assert lines["WantedBy"] == "multi-user.target"
    verifies = shutil.which("systemd-analyze")
    if verifies is None:
        return  # where no systemd is, the keys above are all that can be looked at
    unit = tmp_path / "shop.service"
    # The Python of the example is not on this machine.
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", block.code))
    checked = subprocess.run(
        [verifies, "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not [line for line in checked.stderr.splitlines() if "shop.service" in line]
