"""Projects without Django can use the scripted broker."""

from __future__ import annotations

import subprocess
import sys


def test_the_scripted_broker_imports_no_django() -> None:
    program = (
        "import sys; from django_txmsg.testing import CLASSIC, ScriptedBroker\n"
        "ScriptedBroker(CLASSIC).close()\n"
        "sys.exit('django' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60)
    assert done.returncode == 0
