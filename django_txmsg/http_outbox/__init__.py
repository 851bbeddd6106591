"""The HTTP outbox: a request's messages are sent after its commit, even if the process
dies."""
