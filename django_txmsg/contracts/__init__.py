"""The contract of this service: its destinations, messages and their schemas."""
