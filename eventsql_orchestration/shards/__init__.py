"""Shards: everything on one database, and the cluster of several shards."""
