"""The broker of a Celery app: tasks leave through it, and nothing is received."""
