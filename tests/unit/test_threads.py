"""No class of the package inherits from the standard classes for threads, processes or
dicts. A new Python version might give these classes an attribute that ours already
has."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing.process
import pkgutil
import threading

import pytest

import django_txmsg
import tests.shelved_flows  # noqa: F401 - withdraws the package's own flow

#: Whose private names are not ours to share.
FOREIGN = (
    threading.Thread,
    threading.local,
    multiprocessing.process.BaseProcess,
    dict,
    list,
)
#: Programs of their own, and what needs an extra or a configured project.
APART = ("django_txmsg.spark", "django_txmsg.jms", "django_txmsg.migrations")


def modules() -> list[str]:
    """Return the names of all modules of the package."""
    found = pkgutil.walk_packages(django_txmsg.__path__, "django_txmsg.")
    return [one.name for one in found if not one.name.startswith(APART)]


@pytest.mark.parametrize("name", modules())
def test_no_class_inherits_the_private_names_of_a_thread(name: str) -> None:
    module = importlib.import_module(name)
    for _, kind in inspect.getmembers(module, inspect.isclass):
        if kind.__module__ != name:
            continue
        assert not issubclass(kind, FOREIGN), f"{kind} is a {kind.__mro__[1]}"
