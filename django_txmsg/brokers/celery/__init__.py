"""The broker of a Celery app: tasks are sent through it, and nothing is received."""
