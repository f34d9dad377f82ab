"""Consuming: consumers, claims, leases, dead letters and lag."""
