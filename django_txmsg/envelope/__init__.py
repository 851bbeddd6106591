"""Messages, their encoding, their failures and their redelivery. Nothing here uses
Django."""
