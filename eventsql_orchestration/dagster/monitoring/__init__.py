"""Lag, checks and alerts."""
