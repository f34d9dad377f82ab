"""Queues in Dagster: workers as assets, their sensors, and the depth and age of queues."""
