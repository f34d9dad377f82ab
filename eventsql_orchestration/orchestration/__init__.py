"""Claims, publications, lag and backfills for every orchestrator. It imports no orchestrator.

The wings for Dagster and for Airflow stand on it.
"""
