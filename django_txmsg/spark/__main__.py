"""`python -m django_txmsg.spark JOB …`, and the script that `spark-submit` is given."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
