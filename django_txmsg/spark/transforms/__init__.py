"""Pure functions from DataFrames to DataFrames. Each module defines the schemas of its
results."""
