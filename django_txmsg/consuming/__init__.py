"""Hops 6 to 8: a delivery runs through its stage, all or nothing."""
