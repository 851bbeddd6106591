"""Stages of the test application, found by autodiscovery."""

from __future__ import annotations
