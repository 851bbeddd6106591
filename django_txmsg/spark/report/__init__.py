"""The report of `analyze`: one HTML file with plots, and nothing to fetch."""
