"""The state of messaging, read from the database. Nothing here loads many rows."""
