"""Tests of the STOMP client. Most use the scripted broker."""

from __future__ import annotations
