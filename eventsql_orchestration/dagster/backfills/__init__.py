"""Backfills: windows of a log that Dagster replays."""
