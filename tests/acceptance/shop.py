"""Loads the example project's demo program as a module, for the tests."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

PROJECT = Path(__file__).resolve().parents[2] / "example_project"


def environment(**more: str) -> dict[str, str]:
    """Return an environment without this suite's settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DJANGO_", "TXMSG_", "DATABASE_URL"))
    }
    return {**kept, "PYTHONUNBUFFERED": "1", **more}


def load_demo() -> ModuleType:
    """Return `example_project/demo.py` as a module."""
    spec = importlib.util.spec_from_file_location("shop_demo", PROJECT / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    arguments, sys.argv = sys.argv, ["demo.py"]
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = arguments
    return module
