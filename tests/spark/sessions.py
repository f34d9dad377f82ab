"""Sessions of Spark that have found the data source."""

from __future__ import annotations

from typing import Final

from pyspark.sql import SparkSession

from eventsql_orchestration.spark import FORMAT

LOOKS: Final = 5


def started(builder: SparkSession.Builder) -> SparkSession:
    """Start a session that has found the data source.

    A session looks for sources once, and gives its Python 10 s to answer. On a busy machine, it may find none.
    """
    for _ in range(LOOKS):
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        if _finds_source(session):
            return session
        session.stop()
    raise AssertionError(f"{LOOKS} sessions have not found the data source")


def _finds_source(session: SparkSession) -> bool:
    try:
        session.read.format(FORMAT).load()
    except Exception as refused:  # noqa: BLE001 - without options, the source always refuses to load
        return "DATA_SOURCE_NOT_FOUND" not in str(refused)
    return True
