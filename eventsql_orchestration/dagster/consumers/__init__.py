"""Consumers as Dagster assets: sensors, ticks and runs of claims."""
