"""Floor 4: the data source `eventsql` for Spark 4.3, batch and streaming, read and write.

Nobody registers it: Spark finds the module `pyspark_eventsql` by its name. Importing this package loads neither pyspark
nor pyarrow.

docs/spark.md says it all at length. Offsets are given as Kafka's source has them: `startingOffsets` is the first offset
that is read, `endingOffsets` the first that is not. `range_options` says a range of the log (`after` exclusive, `upto`
inclusive) in these options.

| option of a read | meaning | default |
|---|---|---|
| `dsn`, `schema` | the database, or all shards, and the schema | `EVENTSQL_DSN`, `EVENTSQL_SCHEMA`, eventsql.toml |
| `subscribe` | the topics, separated by commas | one of the three |
| `assign` | the partitions to read: `{"orders": [0, 2]}` | |
| `claim` | a claim's id: what is left of its range, as its consumer's filter has it; not for a stream | |
| `partition` | of the topics of `subscribe`, this partition alone | all of them |
| `startingOffsets` | an offset, `earliest`, a stream's `latest`, or JSON by topic, shard and partition | see there |
| `startingTimestamp` | a time: milliseconds since 1970, or ISO 8601 with a zone | |
| `startingOffsetsByTimestamp` | times by topic, shard and partition, as JSON | |
| `startingOffsetsByTimestampStrategy` | where no event is as new: `error` or `latest`; for a stream | `error` |
| `endingOffsets`, `endingTimestamp`, `endingOffsetsByTimestamp` | the same for the end; not for a stream | `latest` |
| `minPartitions` | tasks to read with at least, as far as there are events for them | |
| `maxRecordsPerPartition` | about how many events a task reads | 250,000 |
| `numPartitions` | tasks to read with, instead of both | |
| `maxOffsetsPerTrigger` | events in a stream's batch at most | no limit |
| `failOnDataLoss` | whether it is an error that retention has dropped what is to be read | `true` |
| `pushFilters` | let the database filter, for a frame that a single query uses; not for a stream | `false` |
| `consumer` | a registered consumer that holds the stream's progress; for a stream | |
| `includeHeaders` | also give the events' metadata | `false` |
| `valueSchema` | values are JSON: decode them to a struct with these columns (DDL) | `value` is binary |
| `mode` | a value that does not fit: `PERMISSIVE` gives nulls, `FAILFAST` an error | `PERMISSIVE` |

A read has the columns `key string`, `value binary`, `topic string`, `partition int`, `offset bigint`,
`timestamp timestamp` (when the event was published) and `headers map<string,string>`; with the URLs of all shards, one
after the other in `dsn`, also `shard string`, and offsets are per shard then. Spark does not tell a Python data
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
| `claimShard` | the shard that the claim is of, where `dsn` has several URLs | |

A write takes the columns `value` (binary or string, never null), `key string`, `topic string`, `partition int` and
`headers map<string,string>`; `offset`, `timestamp` and `shard` are ignored, since the log gives them anew, and any
other is an error. With a `claim` and no `writerId` the writer is that claim's, so that a run which is repeated
publishes once.
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
    """The options that read exactly one range of a topic's log."""
    options = {
        "subscribe": offsets.topic,
        "startingOffsets": str(offsets.after + 1),
        "endingOffsets": str(offsets.upto + 1),
    }
    if offsets.partition != NOT_PARTITIONED:
        options["partition"] = str(offsets.partition)
    return options


SPARK_CONFIG_VARIABLE: Final = "EVENTSQL_SPARK_CONFIG"
"""Names a file of Spark's settings, as `spark-submit --properties-file` takes it: a deployment's cluster."""

_LOOPBACK: Final = {
    # A machine whose own name does not resolve starts Spark all the same, and nobody else reaches it.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def spark_config(**overrides: str) -> dict[str, str]:
    """Settings for a Spark session, for its builder or for dagster-pyspark's resources: on this machine, by default.

    `overrides` replaces any of them or adds to them: `spark_config(**{"spark.master": "local[4]"})`. Those of the file
    that EVENTSQL_SPARK_CONFIG names come last, so that the same code runs on a cluster by a deployment's configuration
    alone. The executors of a cluster reach this machine by its name, unless `spark.driver.host` says another.

    Unless it is set, PYSPARK_PYTHON is made to name this Python: Spark looks for data sources in the Python of its own
    environment, which no setting changes, and finds none in the `python3` of PATH.

    Raises `ConfigurationError` for a file that cannot be read or is not one of settings.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    file = os.environ.get(SPARK_CONFIG_VARIABLE)
    chosen = {"spark.master": "local[2]", **overrides, **(_properties(Path(file)) if file else {})}
    return {
        "spark.app.name": "eventsql",
        "spark.driver.memory": "1g",
        **(_LOOPBACK if chosen["spark.master"].startswith("local") else {}),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # Spark's 200 are for a cluster; on two cores each empty one costs its scheduling.
        "spark.sql.shuffle.partitions": "4",
        # A `dsn` holds a password; Spark's own pattern hides an option called `url` only.
        "spark.sql.redaction.options.regex": "(?i)url|dsn",
        **chosen,
    }


def _properties(file: Path) -> dict[str, str]:
    """The settings of a file, a line each: the name, and after blanks or an equals sign the value."""
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
                f"{SPARK_CONFIG_VARIABLE}: line {number} of {file} is no setting of Spark's: write a name and a value"
            )
        properties[found[1]] = found[2]
    return properties


def eventsql_error(error: BaseException) -> errors.EventSQLError | None:
    """The error of this package within one of Spark's, which carries it as text; None where it has another cause."""
    found = re.findall(rf"^\s*{re.escape(errors.__name__)}\.(\w+): (.*)$", str(error), re.MULTILINE)
    if not found:
        return None
    name, message = found[-1]
    kind = getattr(errors, name, errors.EventSQLError)
    return plain_kind(kind)(message)


def plain_kind(kind: type[errors.EventSQLError]) -> type[errors.EventSQLError]:
    """The kind of error itself, or the nearest that it is one of whose message says it all."""
    plain = errors.EventSQLError.__init__
    return next(each for each in kind.__mro__ if issubclass(each, errors.EventSQLError) and each.__init__ is plain)
