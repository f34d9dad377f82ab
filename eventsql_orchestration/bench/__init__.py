"""Benchmarks: what the platform does per second on a database, beside the most that the database itself does."""
