"""Streams of Spark that run until they have read all there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

STREAM_SECONDS: Final = 200
"""Seconds for a stream to its end."""

STARTS: Final = 10
"""The most starts of a stream whose Python does not start."""

NO_PYTHON: Final = "Python worker failed to connect back"
"""The error of a stream whose Python did not start within 10 s. Spark has no setting for it."""


def await_end(query: StreamingQuery) -> None:
    assert query.awaitTermination(STREAM_SECONDS)


def run_to_end(writer: DataStreamWriter, reach: Callable[[StreamingQuery], None] = await_end) -> StreamingQuery:
    """Run a stream until `reach` returns, and stop it; gives the query.

    On a busy machine, it begins again if its Python does not start.
    """
    starts = 0
    while True:
        starts += 1
        query = None
        try:
            # With Spark Connect, this starts the Python of foreachBatch, too.
            query = writer.start()
            reach(query)
        except PySparkException as error:
            if starts == STARTS or NO_PYTHON not in str(error):
                raise
        else:
            return query
        finally:
            if query is not None:
                query.stop()
