"""Hops 6 to 8: a stage processes a delivery completely or not at all."""
