"""Hop 1 at given times: recurring messages, each stored once per tick."""
