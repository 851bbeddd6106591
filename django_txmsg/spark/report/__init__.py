"""The report of `analyze`: one HTML file with charts, which loads nothing from the
network."""
