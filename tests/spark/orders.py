"""The loop of a process that does what a test's `Driver` tells it, a line each.

Each line is a JSON object: the name of a function, and its arguments. The process answers with a line for each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import SparkSession

from eventsql_orchestration.spark import eventsql_error


def obey(functions: Mapping[str, Callable[..., str]], begin: Callable[[dict[str, Any]], SparkSession]) -> None:
    """The first line has what `begin` needs. The functions take its session."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    spark = begin(json.loads(sys.stdin.readline()))
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = functions[order.pop("do")](spark, **order)
        except Exception as error:  # noqa: BLE001 - the test is told of it
            known = eventsql_error(error)
            answer = f"failed: {error}" if known is None else f"failed: {type(known).__name__}: {known}"
        print(answer.replace("\n", " "), file=out, flush=True)
