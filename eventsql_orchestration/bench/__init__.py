"""Benchmarks: what the platform does per second on a database, beside what that database does at best."""
