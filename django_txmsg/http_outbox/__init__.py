"""The HTTP outbox: a request's messages leave after its commit, even if the process
dies."""
