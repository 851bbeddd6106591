"""What a row's columns mean, written once, in SQL: for the app and for its pipeline."""
