"""What this service promises others: its destinations, messages and their schemas."""
