"""The jobs of the pipeline."""
