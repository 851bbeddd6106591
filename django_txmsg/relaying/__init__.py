"""Hops 3 and 4: the relay sends stored messages to the broker."""
