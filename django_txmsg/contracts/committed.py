"""The committed contract: the file in the repository."""

from __future__ import annotations

import json
from pathlib import Path

from .. import codecs
from ..errors import ConfigurationError
from .document import Contract, text


def path(given: str | None = None) -> Path:
    """Return the path of the contract's file: as given, or TXMSG["CONTRACT"], or
    asyncapi.json beside manage.py."""
    return Path(given) if given else codecs.contract_path()


def read(file: Path) -> Contract:
    """Return the contract in a file. Raises ConfigurationError if it cannot be read."""
    try:
        found: Contract = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(
            f"There is no contract at {file}. Write it with: manage.py txmsg "
            f"contracts export"
        ) from None
    except ValueError as error:
        raise ConfigurationError(f"{file} is not JSON: {error}.") from error
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error}.") from error
    if not isinstance(found, dict) or "asyncapi" not in found:
        raise ConfigurationError(f"{file} is not an AsyncAPI document.")
    return found


def write(file: Path, contract: Contract) -> bool:
    """Write the contract; return whether the file has changed."""
    content = text(contract)
    if file.exists() and file.read_text("utf-8") == content:
        return False
    file.write_text(content, "utf-8")
    return True
