"""Messages, their bytes, their failures and their next attempt. Pure functions and
values."""
