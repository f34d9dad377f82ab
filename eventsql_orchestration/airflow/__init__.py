"""Airflow over topics: a connection, operators, a sensor, and the trigger that schedules DAGs by claims."""
