"""Hops 1 and 9: a message is stored in the transaction that stores your data."""
