"""How messaging is doing. Reads, and keeps what is read small."""
