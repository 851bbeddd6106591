"""What travels: a message, its bytes, its failures and its next attempt. Pure."""
