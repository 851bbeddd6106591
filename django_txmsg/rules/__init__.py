"""The states of rows, defined once in SQL, for the app and for its pipeline."""
