"""The data source `eventsql` for Spark 4.3: batch and streaming, read and write.

Spark finds it by the name of the module `pyspark_eventsql`; nobody registers it. Importing this package loads neither
pyspark nor pyarrow. docs/spark_reading.md and docs/spark_writing.md list all options and columns.

Offsets have Kafka's meaning: `startingOffsets` is the first offset that is read, and `endingOffsets` is the first
offset after the read. `range_options` gives these options for a range of the log, whose `after` is exclusive and
`upto` inclusive.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Final

from eventsql_orchestration import errors
from eventsql_orchestration.model import NOT_PARTITIONED, OffsetRange

FORMAT: Final = "eventsql"
"""The name in `spark.read.format(…)`."""


def range_options(offsets: OffsetRange) -> dict[str, str]:
    """The options that read exactly this range of a topic's log."""
    options = {
        "subscribe": offsets.topic,
        "startingOffsets": str(offsets.after + 1),
        "endingOffsets": str(offsets.upto + 1),
    }
    if offsets.partition != NOT_PARTITIONED:
        options["partition"] = str(offsets.partition)
    return options


SPARK_CONFIG_VARIABLE: Final = "EVENTSQL_SPARK_CONFIG"
"""Names a file of Spark properties, as `spark-submit --properties-file` takes it, with a deployment's settings."""

_SESSION: Final = {
    "spark.app.name": "eventsql",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Spark's default of 200 is for a cluster. On two cores, scheduling an empty partition costs time, too.
    "spark.sql.shuffle.partitions": "4",
    # A `dsn` holds a password. Spark's default pattern hides only an option called `url`.
    "spark.sql.redaction.options.regex": "(?i)url|dsn",
}

_START: Final = {"spark.driver.memory": "1g", "spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
"""Settings that Spark takes when it starts. The client of a Spark Connect server cannot change them."""

_LOOPBACK: Final = {
    # Spark starts on a machine whose own name does not resolve, and no other machine can connect.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def spark_config(**overrides: str) -> dict[str, str]:
    """Settings for a Spark session, for its builder or for dagster-pyspark's resources. The default is this machine.

    `overrides` replaces or adds settings: `spark_config(**{"spark.master": "local[4]"})`. The file that
    EVENTSQL_SPARK_CONFIG names has precedence, so that the same code runs on a deployment's cluster. The executors
    of a cluster connect to this machine by its name, unless `spark.driver.host` gives another. With `spark.remote`, the
    session is one of Spark Connect, and `spark.master` is the server's.

    Sets PYSPARK_PYTHON to this Python if it is not set. Spark looks for data sources in that Python, which no setting
    changes, and finds none in the `python3` of PATH.

    Raises `ConfigurationError` for a file that cannot be read or has anything but settings.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    file = os.environ.get(SPARK_CONFIG_VARIABLE)
    chosen = {**overrides, **(_properties(Path(file)) if file else {})}
    if remote := chosen.get("spark.remote"):
        # Spark refuses a session that names both.
        chosen.pop("spark.master", None)
        starts = {**_START, **_LOOPBACK} if remote.startswith("local") else {}
    else:
        chosen.setdefault("spark.master", "local[2]")
        starts = {**_START, **(_LOOPBACK if chosen["spark.master"].startswith("local") else {})}
    return {**_SESSION, **starts, **chosen}


def _properties(file: Path) -> dict[str, str]:
    """The settings of a file. Each line has a name, blanks or an equals sign, and a value."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise errors.ConfigurationError(f"{SPARK_CONFIG_VARIABLE}: {file} cannot be read: {error}") from None
    properties = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        found = re.fullmatch(r"(spark\.[\w.\-]+)(?:\s*=\s*|\s+)([^\s=].*)", text)
        if found is None:
            raise errors.ConfigurationError(
                f"{SPARK_CONFIG_VARIABLE}: line {number} of {file} is not a Spark setting: write a name and a value"
            )
        properties[found[1]] = found[2]
    return properties


def eventsql_error(error: BaseException) -> errors.EventSQLError | None:
    """The error of this package that Spark's error carries as text. None if it has another cause."""
    found = re.findall(rf"^\s*{re.escape(errors.__name__)}\.(\w+): (.*)$", str(error), re.MULTILINE)
    if not found:
        return None
    name, message = found[-1]
    kind = getattr(errors, name, errors.EventSQLError)
    return plain_kind(kind)(message)


def plain_kind(kind: type[errors.EventSQLError]) -> type[errors.EventSQLError]:
    """The error class itself, or its nearest base that is made from a message alone."""
    plain = errors.EventSQLError.__init__
    return next(each for each in kind.__mro__ if issubclass(each, errors.EventSQLError) and each.__init__ is plain)
