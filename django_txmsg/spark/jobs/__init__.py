"""The jobs. Each reads, transforms and writes."""
