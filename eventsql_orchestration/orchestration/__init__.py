"""What every orchestrator needs of claims, publications, lag and backfills, without any orchestrator.

The wings for Dagster and for Airflow stand on it.
"""
