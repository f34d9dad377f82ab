"""Schedules that keep tables and histories in bounds."""
