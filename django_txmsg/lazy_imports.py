"""What the package imports only when it is used: its public names (PEP 562), and the
packages of its extras, such as `[celery]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the package's `__getattr__` and `__dir__`. `modules` maps modules,
    relative to the package, to their public names. The last module with a name counts.
    """
    homes = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names


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
