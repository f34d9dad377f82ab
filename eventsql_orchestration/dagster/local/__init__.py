"""Dagster on one machine, for development."""
