"""An IO manager over topics: what an asset returns is published, what an asset takes is read from a topic's log."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import dagster as dg
from pydantic import Field, field_validator

from eventsql_orchestration import NOT_PARTITIONED, Event, EventSQL, OffsetRange
from eventsql_orchestration.dagster.lineage import ASSET_KEY, PARTITION, RUN_ID, Origin, input_metadata
from eventsql_orchestration.dagster.metadata import (
    CONSUMED_TOPIC,
    PUBLISHED_AS,
    PUBLISHED_EVENTS,
    PUBLISHED_FIRST,
    PUBLISHED_LAST,
    PUBLISHED_RANGES,
    PUBLISHED_RUN,
    PUBLISHED_TOPIC,
)
from eventsql_orchestration.dagster.publishing import publish
from eventsql_orchestration.dagster.registering import require_topic
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.topics import TOPIC_PREFIX
from eventsql_orchestration.errors import ConfigurationError, ValidationError
from eventsql_orchestration.model import MAX_PARTITIONS, check_partition, check_topic_name

Reads = Literal["topic", "materialization"]

TOPIC: Final = "topic"
"""The metadata of an asset or an output that names its topic."""

READS: Final = "reads"
AFTER: Final = "after"
UPTO: Final = "upto"
TOPIC_PARTITION: Final = "topic partition"
SHARD: Final = "shard"
"""The metadata of an input (`dg.AssetIn(metadata=…)`) that says what of the topic it takes."""

COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp")
"""Of a frame of Spark, as the data source has them; frames of Arrow have the same. Over shards there is one more."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What is loaded: the events of a range, or, with `origin`, those of them whose metadata has all of that.

    `shard` is that of the range, where there are several.
    """

    range: OffsetRange
    origin: Mapping[str, str] = field(default_factory=dict)
    shard: str | None = None

    def has(self, headers: Mapping[str, Any]) -> bool:
        return all(headers.get(name) == text for name, text in self.origin.items())


class EventSQLIOManager(dg.ConfigurableIOManager):
    """Publishes what assets return to their topics, and loads topics for the assets that take them.

    An asset's topic is named by its metadata `topic`, by `topics` here, or by its key `topic/<name>`; that of a
    consumer is none that it publishes to, and is not taken for one. An asset may return a
    DataFrame of Spark or pandas, an Arrow table or RecordBatchReader (with a column `value` and, as wanted, `key`,
    `partition` and `headers`), or an iterable of publications or of mappings with `value`, `key`, `partition` and
    `metadata`; a generator within a `dg.Output`, since Dagster takes it for one of its events else. It is published
    in one transaction, exactly once for each asset, partition and run, however often a step is retried or the run
    re-executed.

    An input is a Spark DataFrame unless it is annotated as a pandas DataFrame, `pyarrow.Table`,
    `pyarrow.RecordBatchReader` or `list[Event]`. It holds the whole topic as it is then, or, where `reads` (here, or in
    the metadata of the input) is `materialization`, the events of the last materialization of the asset; always so for
    a partitioned asset, of each partition that is asked for. The input's metadata `after`, `upto` and `topic partition`
    name a range. Over shards, frames have one more column `shard`, and the input's metadata `shard` names one of them,
    as `after` and `upto` need it.

    Errors are those of this package, and leave nothing published.
    """

    eventsql: EventSQLResource
    topics: dict[str, str] = Field(
        default={}, description="Topics of assets whose metadata and key name none, by asset key: a/b"
    )
    reads: Reads = Field(default="topic", description="What inputs hold: the whole topic, or a materialization")
    spark_config: dict[str, str] = Field(
        default={}, description="Settings for the Spark session, where inputs need one and none is active"
    )

    @field_validator("topics")
    @classmethod
    def _topics_have_names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value.values():
            check_topic_name(name)
        return value

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        """Publish what was returned; the materialization gets topic, number of events and offsets as metadata."""
        topic = self._topic_of_output(context)
        if obj is None:
            raise ValidationError(
                f"nothing was returned to publish to topic {topic!r}: return an empty list where there are no events, "
                "or annotate the function with -> None"
            )
        output = f"output {context.step_key}.{context.name}"
        if context.mapping_key is not None:
            output += f"[{context.mapping_key}]"
        published = publish(Origin.of_output(context), obj, eventsql=self.eventsql, topic=topic, output=output)
        context.log.info("%s", published)
        context.add_output_metadata(published.metadata())

    def load_input(self, context: dg.InputContext) -> Any:
        """The events that an asset asks for, in the form of its annotation."""
        annotation = context.dagster_type.typing_type
        form = _form(annotation)
        topic = self._topic_of_input(context)
        require_topic(self.eventsql.platform, topic)
        parts = self._selections(context, topic)
        selections = [each for part in parts for each in part]
        ranges = [
            {
                **({} if each.shard is None else {SHARD: each.shard}),
                "partition": each.range.partition,
                AFTER: each.range.after,
                UPTO: each.range.upto,
            }
            for each in selections
        ]
        if len(parts) == 1:
            context.add_input_metadata(input_metadata(topic, ranges))
        else:
            # Dagster observes one partition of an input at most.
            context.log.info("input %s is loaded from %s of topic %s", context.name, ranges, topic)
        return getattr(self, f"_load_{form}")(selections)

    def _topic_of_output(self, context: dg.OutputContext) -> str:
        metadata = {**context.definition_metadata, **context.output_metadata}
        if context.has_asset_key:
            return self._topic(context.asset_key, metadata)
        if TOPIC in metadata:
            return check_topic_name(_plain(metadata[TOPIC]))
        raise ConfigurationError(
            f"output {context.name!r} of {context.step_key} names no topic: give it metadata={{'topic': …}}"
        )

    def _topic_of_input(self, context: dg.InputContext) -> str:
        if TOPIC in context.definition_metadata:
            return check_topic_name(_plain(context.definition_metadata[TOPIC]))
        upstream = context.upstream_output
        metadata = {} if upstream is None else upstream.definition_metadata
        if context.has_asset_key:
            return self._topic(context.asset_key, metadata)
        if TOPIC in metadata:
            return check_topic_name(_plain(metadata[TOPIC]))
        raise ConfigurationError(f"input {context.name!r} names no topic: give it metadata={{'topic': …}}")

    def _topic(self, key: dg.AssetKey, metadata: Mapping[str, Any]) -> str:
        if TOPIC in metadata:
            return check_topic_name(_plain(metadata[TOPIC]))
        name = key.to_user_string()
        if name in self.topics:
            return self.topics[name]
        if key.path[0] == TOPIC_PREFIX and len(key.path) == 2:
            return check_topic_name(key.path[1])
        if CONSUMED_TOPIC in metadata:
            raise ConfigurationError(
                f"asset {name} consumes topic {_plain(metadata[CONSUMED_TOPIC])!r}, which holds nothing that it made: "
                "take an asset topic/<name> that it publishes to, or name its topic in `topics` of the IO manager"
            )
        raise ConfigurationError(
            f"asset {name} has no topic: give it metadata={{'topic': …}}, name one in `topics` of the IO manager, or "
            "call the asset topic/<name>"
        )

    def _selections(self, context: dg.InputContext, topic: str) -> list[list[Selection]]:
        """What is loaded, for each partition of the asset that is asked for."""
        metadata = {name: _plain(value) for name, value in context.definition_metadata.items()}
        reads = metadata.get(READS, self.reads)
        if reads not in typing.get_args(Reads):
            raise ConfigurationError(
                f"input {context.name!r}: metadata reads is topic or materialization, not {reads!r}"
            )
        named = {AFTER, UPTO, TOPIC_PARTITION, SHARD} & metadata.keys()
        if not named:
            if context.has_asset_key and context.has_asset_partitions:
                return [self._materialized(context, topic, key) for key in context.asset_partition_keys]
            if reads == "materialization":
                return [self._materialized(context, topic, None)]
        return [self._named_ranges(context.name, topic, metadata)]

    def _materialized(self, context: dg.InputContext, topic: str, partition: str | None) -> list[Selection]:
        # Of nothing there is a frame too.
        nothing = Selection(OffsetRange(topic, NOT_PARTITIONED, 0, 0), shard=self.eventsql.shards[0].shard)
        return _materialized(context, topic, partition) or [nothing]

    def _named_ranges(self, name: str, topic: str, metadata: Mapping[str, Any]) -> list[Selection]:
        shard = metadata.get(SHARD)
        shards = self.eventsql.shards if shard is None else (self.eventsql.shard(str(shard)),)
        if len(shards) > 1 and {AFTER, UPTO} & metadata.keys():
            raise ConfigurationError(
                f"input {name!r}: offsets are those of one shard: name it in metadata shard, one of "
                f"{', '.join(str(each.shard) for each in shards)}"
            )
        return [self._named_range(name, topic, metadata, each) for each in shards]

    def _named_range(self, name: str, topic: str, metadata: Mapping[str, Any], platform: EventSQL) -> Selection:
        for each in (AFTER, UPTO, TOPIC_PARTITION):
            if each in metadata and type(metadata[each]) is not int:
                raise ConfigurationError(f"input {name!r}: metadata {each} is a whole number, not {metadata[each]!r}")
        partition = metadata.get(TOPIC_PARTITION, NOT_PARTITIONED)
        if partition != NOT_PARTITIONED:
            found = platform.registry.topic(topic)
            # One that was repartitioned may have had more of them.
            check_partition(topic, partition, found.partitions if found.layout == 1 else MAX_PARTITIONS)
        after = metadata.get(AFTER, 0)
        # An end that is named is taken as it is: events may still come before it.
        upto = metadata[UPTO] if UPTO in metadata else max(after, platform.reader.end(topic))
        return Selection(OffsetRange(topic, partition, after, upto), shard=platform.shard)

    def _load_spark(self, selections: Sequence[Selection]) -> Any:
        # They start no Java before an input needs it.
        from pyspark.sql import SparkSession  # noqa: PLC0415
        from pyspark.sql import functions as f  # noqa: PLC0415

        from eventsql_orchestration.spark import FORMAT, range_options, spark_config  # noqa: PLC0415

        session = SparkSession.getActiveSession()
        if session is None:
            builder = SparkSession.Builder()
            for name, value in spark_config(**self.spark_config).items():
                builder = builder.config(name, value)
            session = builder.getOrCreate()
        loaded = None
        for selection in selections:
            reader = session.read.format(FORMAT).options(
                **self.eventsql.spark_options(selection.shard), **range_options(selection.range)
            )
            frame = reader.options(includeHeaders="true").load() if selection.origin else reader.load()
            for name, text in selection.origin.items():
                frame = frame.where(f.col("headers")[name] == text)
            frame = frame.select(*COLUMNS)
            if selection.shard is not None:
                frame = frame.withColumn(SHARD, f.lit(selection.shard))
            loaded = frame if loaded is None else loaded.unionAll(frame)
        return loaded

    def _batches(self, selections: Sequence[Selection]) -> Iterator[tuple[str | None, list[Event]]]:
        for selection in selections:
            offsets = selection.range
            partition = None if offsets.partition == NOT_PARTITIONED else offsets.partition
            for batch in self.eventsql.shard(selection.shard).reader.stream(
                offsets.topic, after=offsets.after, upto=offsets.upto, partition=partition
            ):
                chosen = [event for event in batch if selection.has(event.metadata)] if selection.origin else batch
                yield selection.shard, chosen

    def _load_events(self, selections: Sequence[Selection]) -> list[Event]:
        return [event for _, batch in self._batches(selections) for event in batch]

    def _load_arrow_reader(self, selections: Sequence[Selection]) -> Any:
        from eventsql_orchestration.dagster.frames import events_as_arrow  # noqa: PLC0415 - pyarrow takes 0.2 s to load

        return events_as_arrow(self._batches(selections), shards=len(self.eventsql.platform.shards) > 1)

    def _load_arrow(self, selections: Sequence[Selection]) -> Any:
        return self._load_arrow_reader(selections).read_all()

    def _load_pandas(self, selections: Sequence[Selection]) -> Any:
        return self._load_arrow(selections).to_pandas()


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, dg.MetadataValue) else value


def _form(annotation: Any) -> str:
    """Which `_load_…` gives what an input is annotated as. Raises `ConfigurationError` for what none does."""
    from eventsql_orchestration.dagster.frames import is_pandas_frame, is_spark_frame  # noqa: PLC0415 - pyarrow

    if annotation is Any or annotation is type(None) or is_spark_frame(annotation):
        return "spark"
    if is_pandas_frame(annotation):
        return "pandas"
    plain = typing.get_origin(annotation) or annotation
    of = typing.get_args(annotation)
    if plain in (list, Sequence) and of in ((), (Event,), (Any,)):
        return "events"
    module, name = getattr(annotation, "__module__", ""), getattr(annotation, "__name__", "")
    if module.partition(".")[0] == "pyarrow" and name in ("Table", "RecordBatchReader"):
        return "arrow" if name == "Table" else "arrow_reader"
    raise ConfigurationError(
        f"a topic cannot be loaded as {annotation}: annotate the input as a DataFrame of Spark or pandas, "
        "pyarrow.Table, pyarrow.RecordBatchReader or list[Event]"
    )


def _materialized(context: dg.InputContext, topic: str, partition: str | None) -> list[Selection]:
    """The events of the last materialization of an asset, or of one of its partitions; none where it had none."""
    what = context.asset_key.to_user_string() + ("" if partition is None else f" [{partition}]")
    records = context.instance.fetch_materializations(
        dg.AssetRecordsFilter(asset_key=context.asset_key, asset_partitions=None if partition is None else [partition]),
        limit=1,
    ).records
    materialization = records[0].asset_materialization if records else None
    if materialization is None:
        raise ValidationError(f"{what} has not been materialized: there is nothing to load")
    metadata = {name: value.value for name, value in materialization.metadata.items()}
    if metadata.get(PUBLISHED_TOPIC) != topic:
        raise ValidationError(f"the last materialization of {what} says nothing of events that it published to {topic}")
    if not metadata.get(PUBLISHED_EVENTS):
        return []
    ends = [{"first": metadata.get(PUBLISHED_FIRST), "last": metadata.get(PUBLISHED_LAST)}]
    told: Any = metadata.get(PUBLISHED_RANGES)
    ranges: list[dict[str, Any]] = told or ends
    if any(not isinstance(each[end], int) for each in ranges for end in ("first", "last")):
        raise ValidationError(
            f"the last materialization of {what} does not say the offsets of its events, which had not been "
            "transferred: name a range, or read the whole topic"
        )
    named = {ASSET_KEY: metadata.get(PUBLISHED_AS), PARTITION: partition, RUN_ID: metadata.get(PUBLISHED_RUN)}
    origin = {name: text for name, text in named.items() if isinstance(text, str)}
    return [
        Selection(OffsetRange(topic, NOT_PARTITIONED, each["first"] - 1, each["last"]), origin, each.get("shard"))
        for each in ranges
    ]
