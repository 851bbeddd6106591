"""A certificate authority for `stomp+ssl://`. It exists until the end of the test
run."""

from __future__ import annotations

import subprocess
from pathlib import Path

PASSWORD = "txmsg-keystore"


class Certificates:
    """A directory with a certificate authority, and with a certificate for `localhost`
    that the authority has signed."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.authority = directory / "ca.pem"
        self.certificate = directory / "server.pem"
        self.key = directory / "server.key"
        self.keystore = directory / "server.p12"
        if not self.keystore.exists():
            self._make(directory)

    def _make(self, directory: Path) -> None:
        authority_key = directory / "ca.key"
        new_key = ["-newkey", "rsa:2048", "-nodes", "-subj"]
        _openssl(
            *["req", "-x509", "-days", "2", "-out", self.authority],
            *[*new_key, "/CN=txmsg tests", "-keyout", authority_key],
            *["-addext", "keyUsage=critical,keyCertSign"],
        )
        _openssl(
            *["req", "-x509", "-days", "2", "-out", self.certificate],
            *[*new_key, "/CN=localhost", "-keyout", self.key],
            *["-CA", self.authority, "-CAkey", authority_key],
            *["-addext", "basicConstraints=critical,CA:FALSE"],
            *["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"],
        )
        _openssl(
            *["pkcs12", "-export", "-in", self.certificate, "-inkey", self.key],
            *["-out", self.keystore, "-passout", f"pass:{PASSWORD}"],
        )


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(
        ["openssl", *map(str, arguments)], check=True, capture_output=True, text=True
    )
