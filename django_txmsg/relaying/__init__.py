"""Hops 3 and 4: the relay takes stored messages to the broker."""
