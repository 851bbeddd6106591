"""A role of PostgreSQL with the privileges that the manual names."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "production.md"


def documented() -> list[str]:
    """Return the statements that the page gives for existing tables."""
    section = PAGE.read_text().split("### Privileges on PostgreSQL")[1]
    found = re.findall(r"^GRANT .*;$", section, re.MULTILINE)
    assert len(found) == 2
    return found


@contextmanager
def acting(execute: Callable[[str], object], database: str) -> Iterator[str]:
    """Make new connections to a database use a role with the documented privileges.
    Yields the role. `execute` runs a statement as the owner. Other databases of the
    server, in which other tests run, keep their role."""
    role = f"shop_{uuid.uuid4().hex}"
    user = f'ALTER ROLE SESSION_USER IN DATABASE "{database}"'
    execute(f"CREATE ROLE {role}")
    try:
        for statement in documented():
            execute(statement.replace(" TO shop;", f" TO {role}"))
        execute(f"{user} SET role = {role}")
        yield role
    finally:
        execute("SET ROLE NONE")
        execute(f"{user} RESET role")
        execute(f"DROP OWNED BY {role}")
        execute(f"DROP ROLE {role}")
