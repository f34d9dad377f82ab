"""The program of a Spark Connect server: `python -m eventsql_orchestration.spark.connect_main NAME=VALUE…`.

The arguments are Spark's settings. The program ends when its Spark ends.

Spark's own program for a server gives each session Python processes of its own, and keeps them until the server ends
(SPARK-54055). Five processes of 36 MB are left of a run that reads and writes topics. Here, all sessions share these
processes, because their artifacts are not isolated, which is the default of a Python driver.
"""

from __future__ import annotations

import os
import sys
from typing import Final

from pyspark.sql import SparkSession

_SETTINGS: Final = {
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
    # The environment, or the package `pyspark_connect`, may name the other mode, which isolates artifacts.
    "spark.api.mode": "classic",
    # A file that a session adds may have been added by an earlier session, with other content.
    "spark.files.overwrite": "true",
    # A process that is used again would keep the modules that an earlier session imported, and not see their changes.
    "spark.python.worker.reuse": "false",
}


def main() -> None:
    settings = dict(word.split("=", 1) for word in sys.argv[1:])
    SparkSession.Builder().config(map={**_SETTINGS, **settings}).getOrCreate()
    # Spark's Java is the only child.
    os.wait()


if __name__ == "__main__":
    main()
