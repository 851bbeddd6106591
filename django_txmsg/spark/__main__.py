"""Runs a job: `python -m django_txmsg.spark JOB …`, or as the script for
`spark-submit`."""

from __future__ import annotations

import sys

# spark-submit runs this file as a script, which belongs to no package.
from django_txmsg.spark.cli import main

if __name__ == "__main__":
    sys.exit(main())
