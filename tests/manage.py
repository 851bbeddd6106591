"""The `manage.py` of the test project, whose commands the tests start, stop and
kill."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from django.core.management import execute_from_command_line


def main() -> None:
    """Run a management command under the test settings."""
    # In place of tests/: `tests` is a package, its modules are no top-level names.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
