"""The jobs: each reads, transforms and writes, and decides nothing else."""
