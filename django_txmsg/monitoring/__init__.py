"""The state of messaging: read-only, with small results."""
