"""Floor 4: the data source `eventsql` for Spark 4.3, batch and streaming, read and write.

Nobody registers it: Spark finds the module `pyspark_eventsql` by its name. Importing this package loads neither pyspark
nor pyarrow.

Offsets are given as Kafka's source has them: `startingOffsets` is the first offset that is read, `endingOffsets` the
first that is not. `range_options` says a range of the log (`after` exclusive, `upto` inclusive) in these options.

| option of a read | meaning | default |
|---|---|---|
| `dsn`, `schema` | the database and the platform's schema in it | `EVENTSQL_DSN`, `EVENTSQL_SCHEMA`, eventsql.toml |
| `subscribe` | the topic | required |
| `startingOffsets` | an offset or `earliest`; a stream may start at `latest` | `earliest`; a stream's: `latest` |
| `endingOffsets` | an offset or `latest`; not for a stream | `latest` |
| `partition` | read this partition alone | -1: all of them |
| `numPartitions` | tasks to read with, as far as there are events for them | one per 250,000 events |
| `maxOffsetsPerTrigger` | events in a stream's batch at most | no limit |
| `includeHeaders` | also give the events' metadata | `false` |

A read has the columns `key string`, `value binary`, `topic string`, `partition int`, `offset bigint`,
`timestamp timestamp` (when the event was published) and `headers map<string,string>`. Spark does not tell a Python data
source which columns a query needs: ask for a few with `.schema("key string, offset bigint")` and no other is fetched.

| option of a write | meaning | default |
|---|---|---|
| `dsn`, `schema` | as above | |
| `topic` | the topic of every row, instead of a column | the column `topic` |
| `header.<name>` | goes into every event's metadata; Spark makes the name lower case | |
| `headers` | the same for any names: a JSON object of strings | |
| `writerId` | one writer publishes a batch once, however often it is written | a new one; a stream's: its query |
| `batchId` | the writer's batch; not for a stream | 0; a stream's: its own |
| `claim` | a claim's id: its range is committed in the publishing transaction; not for a stream | none |

A write takes the columns `value` (binary or string, never null), `key string`, `topic string`, `partition int` and
`headers map<string,string>`; `offset` and `timestamp` are ignored, since the log gives them anew, and any other is an
error. With a `claim` and no `writerId` the writer is that claim's, so that a run which is repeated publishes once.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Final

from eventsql_orchestration import errors
from eventsql_orchestration.model import NOT_PARTITIONED, OffsetRange

FORMAT: Final = "eventsql"
"""The name in `spark.read.format(…)`."""


def range_options(offsets: OffsetRange) -> dict[str, str]:
    """The options that read exactly one range of a topic's log."""
    options = {
        "subscribe": offsets.topic,
        "startingOffsets": str(offsets.after + 1),
        "endingOffsets": str(offsets.upto + 1),
    }
    if offsets.partition != NOT_PARTITIONED:
        options["partition"] = str(offsets.partition)
    return options


def spark_config(**overrides: str) -> dict[str, str]:
    """Settings for a Spark session on this machine, for a session's builder or dagster-pyspark's resources.

    `overrides` replaces any of them or adds to them: `spark_config(**{"spark.master": "local[4]"})`.

    Unless it is set, PYSPARK_PYTHON is made to name this Python: Spark looks for data sources in the Python of its own
    environment, which no setting changes, and finds none in the `python3` of PATH.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return {
        "spark.master": "local[2]",
        "spark.app.name": "eventsql",
        "spark.driver.memory": "1g",
        # A machine whose own name does not resolve starts Spark all the same, and nobody else reaches it.
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # Spark's 200 are for a cluster; on two cores each empty one costs its scheduling.
        "spark.sql.shuffle.partitions": "4",
        # A `dsn` holds a password; Spark's own pattern hides an option called `url` only.
        "spark.sql.redaction.options.regex": "(?i)url|dsn",
        **overrides,
    }


def eventsql_error(error: BaseException) -> errors.EventSQLError | None:
    """The error of this package within one of Spark's, which carries it as text; None where it has another cause."""
    found = re.findall(rf"^\s*{re.escape(errors.__name__)}\.(\w+): (.*)$", str(error), re.MULTILINE)
    if not found:
        return None
    name, message = found[-1]
    kind = getattr(errors, name, errors.EventSQLError)
    if kind.__init__ is not errors.EventSQLError.__init__:
        # It takes more than a message, and the message has it all.
        kind = errors.EventSQLError
    return kind(message)
