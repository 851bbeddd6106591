"""The package's extras, such as `[celery]`: which one to install if a package of it is
missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f'pip install "django_txmsg[{extra}]"'


@contextmanager
def needs(
    user: str, extra: str, *packages: str, error: type[Exception] | None = None
) -> Iterator[None]:
    """Surround the import of an extra's packages. If one of `packages` is missing,
    raise `error`, by default a ModuleNotFoundError, which says that `user` needs the
    extra. If another package is missing, such as a dependency, Python's error names
    it."""
    try:
        yield
    except ModuleNotFoundError as missing:
        name = str(missing.name).partition(".")[0]
        if name not in packages:
            raise
        text = f"{user} needs {name}, which is not installed. Run: {install(extra)}"
        if error is None:
            raise ModuleNotFoundError(text, name=name) from missing
        raise error(text) from missing
