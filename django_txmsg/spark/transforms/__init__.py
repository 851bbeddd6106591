"""Pure functions from DataFrames to DataFrames. Each module has the schemas of its
results."""
