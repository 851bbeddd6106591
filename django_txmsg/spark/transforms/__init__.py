"""Pure functions from DataFrames to DataFrames, each with its schema beside it."""
