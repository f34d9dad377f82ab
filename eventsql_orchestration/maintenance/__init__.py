"""Maintenance of logs: retention, seek and repartitioning."""
