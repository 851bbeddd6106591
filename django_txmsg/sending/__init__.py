"""Hops 1 and 9: a message is stored with the data of its transaction."""
