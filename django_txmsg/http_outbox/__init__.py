"""The HTTP-request outbox: a request's messages leave after its commit, for sure."""
