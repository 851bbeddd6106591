"""An S3 server from the library moto. It supports conditional writes, and accepts any
access key."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

from .server import Server, free_port

#: What the server takes for a key, as anything: a text that is found where it leaks.
SECRET = "s3-secret-of-the-tests"


class S3(Server):
    """An object store in memory."""

    name = "s3"
    debian_packages = "python3-pip && pip install 'moto[server]'"

    def __init__(self) -> None:
        super().__init__()
        self.port = free_port()

    @classmethod
    def programs(cls) -> dict[str, Path | None]:
        found = find_spec("moto") and find_spec("flask")
        return {"moto[server]": Path(sys.executable) if found else None}

    def prepare(self) -> None:
        """Do nothing: all data is in memory."""

    def launch(self) -> subprocess.Popen[bytes]:
        address = ["-H", "127.0.0.1", "-p", str(self.port)]
        return self.spawn([sys.executable, "-m", "moto.server", *address])

    def ready(self) -> bool:
        try:
            urllib.request.urlopen(self.url, timeout=5).close()
        except OSError:
            return False
        return True

    @property
    def url(self) -> str:
        """Return the URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, str]:
        """Return the storage options of a lake on this server."""
        return {
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
        }

    def make_bucket(self, name: str) -> None:
        """Create an empty bucket."""
        request = urllib.request.Request(f"{self.url}/{name}", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
