"""Refuses a commit if its subject is not `scope: imperative`, or has more than 72
characters.

    scripts/commit_subject.py .git/COMMIT_EDITMSG
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

#: Merges and reverts have a form of their own.
ALLOWED = re.compile(r"(Merge |Revert )|[a-z0-9_.,/ -]+: [a-z`@A-Z]")
#: How a statement or a past tense begins, where an imperative is meant.
STATEMENT = re.compile(
    r"[^:]+: (a|an|the|what|it|this|that|is|was"
    r"|(?!embed|feed|speed|seed|exceed|proceed|bring|ring|string|ping)\w+(ed|ing))\b",
    re.IGNORECASE,
)


def complaint(subject: str) -> str:
    """Return what is wrong with a subject, or "" if it is correct."""
    if len(subject) > 72:
        return f"has {len(subject)} characters; at most 72"
    if not ALLOWED.match(subject):
        return "has no scope: write `scope: do this`"
    if STATEMENT.match(subject):
        return "is a statement: begin with what the commit does, `add`, `keep`, `stop`"
    return ""


if __name__ == "__main__":
    subject, *_ = Path(sys.argv[1]).read_text().splitlines() or [""]
    wrong = complaint(subject)
    if wrong:
        sys.exit(f"The subject {subject!r} {wrong}.")
