"""Streams of Spark that run until they have read all there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

PATIENCE: Final = 200
"""Seconds for a stream to its end."""

NO_PYTHON: Final = "Python worker failed to connect back"
"""The error of a stream whose Python did not start within 10 s. Spark has no setting for it."""


def run_to_end(
    writer: DataStreamWriter, reach: Callable[[StreamingQuery], object] = lambda query: query.awaitTermination(PATIENCE)
) -> StreamingQuery:
    """Run a stream until it ends by itself, or until what `reach` waits for; gives the query, which has ended.

    On a busy machine, it begins again until its Python starts.
    """
    while True:
        query = writer.start()
        try:
            assert reach(query) is not False
        except StreamingQueryException as error:
            if NO_PYTHON not in str(error):
                raise
        else:
            return query
        finally:
            query.stop()
