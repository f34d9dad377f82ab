"""Benchmarks: the platform's rates on a database, beside the highest rates of the database itself."""
