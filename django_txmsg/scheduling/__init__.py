"""Hop 1 by the clock: recurring messages, each stored once per tick."""
