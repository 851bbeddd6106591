"""What keeps a long-lived process at work: connections, threads, leases, outages."""
