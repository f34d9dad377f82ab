"""Backfills: plans, windows and their side consumers in the database."""
