"""Infrastructure of long-lived processes: connections, threads, leases, outages."""
