"""Messages, their encoding, their failures and their redelivery, as pure functions and
values."""
