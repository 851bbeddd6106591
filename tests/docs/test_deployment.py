"""Units, Compose files and manifests of the documentation are what their tools read."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

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


def test_the_compose_file_of_the_repository_names_images() -> None:
    found = yaml.safe_load((ROOT / "docker-compose.yml").read_text())

    assert all(one.keys() & {"image", "build"} for one in found["services"].values())


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
