"""The HTTP outbox: a request's messages are sent after the request's commit, even if
the process dies."""
