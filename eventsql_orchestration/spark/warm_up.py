"""Use a Spark Connect server once, so that the first session of a run finds its classes loaded.

`python -m eventsql_orchestration.spark.warm_up PORT` waits until the server of `spark_config()` listens on this port of
loopback, reads with the data source, and ends. The first session of a server takes some ten seconds longer than others.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
import warnings
from contextlib import suppress
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from eventsql_orchestration.spark import FORMAT, spark_config

LIMIT_SECONDS: Final = 120
"""Seconds after which this process is ended, whatever it waits for."""

_NO_TOPIC: Final = "eventsql_warm_up"


def main() -> None:
    signal.alarm(LIMIT_SECONDS)
    port = int(sys.argv[1])
    # A session that finds no server waits longer and longer before it tries again.
    while not _listens(port):
        time.sleep(0.2)
    warnings.simplefilter("ignore")
    session = SparkSession.Builder().config(map={**spark_config()}).getOrCreate()
    session.range(2, numPartitions=1).groupBy("id").count().collect()
    # The topic does not exist. To find that out, Spark loads the source and the planner of its reads.
    with suppress(PySparkException):
        session.read.format(FORMAT).option("subscribe", _NO_TOPIC).load().count()
    session.stop()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


if __name__ == "__main__":
    main()
