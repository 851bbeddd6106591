"""The STOMP client, against the scripted broker unless a file says otherwise."""

from __future__ import annotations
