"""Hop 1 on a schedule: recurring messages, stored once at each tick."""
