"""Hops 3 and 4: stored messages are taken to the broker."""
