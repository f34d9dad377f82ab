"""An IO manager over topics: publishes the values of assets, and loads inputs from the logs of topics."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import dagster as dg
from pydantic import Field, field_validator

from eventsql_orchestration import NOT_PARTITIONED, Event, OffsetRange, Shard
from eventsql_orchestration.dagster import metadata_keys as keys
from eventsql_orchestration.dagster.lineage.origin import RANGE, Origin, input_metadata
from eventsql_orchestration.dagster.lineage.published import metadata_of
from eventsql_orchestration.dagster.register import require_topic
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.topics import TOPIC_PREFIX
from eventsql_orchestration.errors import ConfigurationError, DataLossError, ValidationError
from eventsql_orchestration.model import check_partition, check_topic_name
from eventsql_orchestration.orchestration import publication
from eventsql_orchestration.orchestration.provenance import DAGSTER_ASSET, DAGSTER_PARTITION, DAGSTER_RUN
from eventsql_orchestration.topics.reader import Reader

Reads = Literal["topic", "materialization"]

TOPIC: Final = "topic"
"""The metadata key of an asset, an input or an output that names its topic."""

READS: Final = "reads"
AFTER: Final = "after"
UPTO: Final = "upto"
TOPIC_PARTITION: Final = "topic partition"
SHARD: Final = "shard"
"""Metadata keys of an input (`dg.AssetIn(metadata=…)`) that choose the events to load."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The events to load: all events of a range, or with `origin` only the events with these entries in their metadata.

    `shard` is the shard of the range; None if there is one database.
    """

    range: OffsetRange
    origin: Mapping[str, str] = field(default_factory=dict)
    shard: str | None = None

    def has(self, headers: Mapping[str, Any]) -> bool:
        """Whether an event with this metadata is selected."""
        return all(headers.get(name) == text for name, text in self.origin.items())

    def metadata(self) -> dict[str, Any]:
        found = {"partition": self.range.partition, AFTER: self.range.after, UPTO: self.range.upto}
        return found if self.shard is None else {SHARD: self.shard, **found}


class EventSQLIOManager(dg.ConfigurableIOManager):
    """Publishes the values of assets to their topics, and loads topics as inputs of assets.

    The metadata `topic` of an asset, the field `topics` or the asset's key `topic/<name>` names its topic. The topic
    that a consumer reads is not its output topic.

    An asset may return a DataFrame of Spark or pandas, an Arrow table or RecordBatchReader, with a column `value` and
    optionally `key`, `partition` and `headers`; or an iterable of publications or of mappings with `value`, `key`,
    `partition` and `metadata`. Wrap a generator in a `dg.Output`. Otherwise, Dagster takes its items for Dagster's own
    events. The value is published in one transaction, exactly once for each asset, partition and run: retried steps and
    re-executed runs publish nothing again.

    An input is a Spark DataFrame unless it is annotated as a pandas DataFrame, `pyarrow.Table`,
    `pyarrow.RecordBatchReader` or `list[Event]`. It holds the whole topic at the time of loading. If `reads` (here, or
    in the input's metadata) is `materialization`, it holds the events that the asset published in the same run, or in
    the run that this run executes again; otherwise the events of its last materialization. A partitioned asset is
    always read in this way, for each requested partition. Events that one run published for several partitions are
    loaded only for all of them together. The input's metadata `after`, `upto` and `topic partition` select a range.
    Over shards, frames have a column `shard`, and `after` and `upto` need the shard's name in the input's metadata
    `shard`.

    All errors are errors of this package; after an error, nothing is published. If retention has dropped a part of an
    input's range, the input raises `DataLossError`. The whole topic begins with its oldest remaining event.
    """

    eventsql: EventSQLResource
    topics: dict[str, str] = Field(
        default={}, description="The topics of assets whose metadata and key name no topic, by asset key: a/b"
    )
    reads: Reads = Field(default="topic", description="Contents of inputs: the whole topic, or a materialization")
    spark_config: dict[str, str] = Field(
        default={}, description="Settings for the Spark session that an input starts if no session is active"
    )

    @field_validator("topics")
    @classmethod
    def _topics_have_names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value.values():
            check_topic_name(name)
        return value

    def topic_of(self, key: dg.AssetKey) -> str | None:
        """The topic of an asset whose metadata names no topic; None if it has none. Override it for your own keys.

        An entry in `topics` takes precedence over a key `topic/<name>`.
        """
        if (name := self.topics.get(key.to_user_string())) is not None:
            return name
        return key.path[1] if key.path[0] == TOPIC_PREFIX and len(key.path) == 2 else None

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:
        """Publish a value. Its materialization gets the topic, the number of events and their offsets as metadata."""
        metadata = {**context.definition_metadata, **context.output_metadata}
        topic = self._topic(context, metadata, f"output {context.name!r} of {context.step_key}")
        if obj is None:
            raise ValidationError(
                f"the function returned None, and topic {topic!r} takes events: return an empty list for none, "
                "or annotate the function with -> None"
            )
        output = f"output {context.step_key}.{context.name}"
        if context.mapping_key is not None:
            output += f"[{context.mapping_key}]"
        require_topic(self.eventsql.platform, topic)
        published = publication.publish(
            Origin.of_output(context), obj, access=self.eventsql, topic=topic, output=output
        )
        context.log.info("%s", published)
        context.add_output_metadata(metadata_of(published))

    def load_input(self, context: dg.InputContext) -> Any:
        """Load the events that an input asks for, as the type of its annotation."""
        load = self._loader(context.dagster_type.typing_type)
        upstream = {} if context.upstream_output is None else context.upstream_output.definition_metadata
        topic = self._topic(context, {**upstream, **context.definition_metadata}, f"input {context.name!r}")
        require_topic(self.eventsql.platform, topic)
        parts = self._selections(context, topic)
        # A run of several partitions publishes their events together.
        selections = list({(each.shard, each.range): each for part in parts for each in part}.values())
        if not selections:
            # No events make an empty frame.
            selections = [Selection(OffsetRange(topic, NOT_PARTITIONED, 0, 0), shard=self.eventsql.shards[0].name)]
        ranges = [each.metadata() for each in selections]
        if len(parts) == 1:
            context.add_input_metadata(input_metadata(topic, ranges))
        else:
            # Dagster can record an observation for one partition of an input at most.
            context.log.info("input %s is loaded from %s of topic %s", context.name, ranges, topic)
        return load(selections)

    def _topic(self, context: dg.OutputContext | dg.InputContext, metadata: Mapping[str, Any], what: str) -> str:
        if TOPIC in metadata:
            return check_topic_name(_plain(metadata[TOPIC]))
        if not context.has_asset_key:
            raise ConfigurationError(f"{what} names no topic: give it metadata={{'topic': …}}")
        name = context.asset_key.to_user_string()
        if (found := self.topic_of(context.asset_key)) is not None:
            return check_topic_name(found)
        if keys.CONSUMED_TOPIC in metadata:
            raise ConfigurationError(
                f"asset {name} consumes topic {_plain(metadata[keys.CONSUMED_TOPIC])!r} and does not publish to it: "
                "use the asset topic/<name> that it publishes to, or name its topic in `topics` of the IO manager"
            )
        raise ConfigurationError(
            f"asset {name} has no topic: give it metadata={{'topic': …}}, name one in `topics` of the IO manager, or "
            "call the asset topic/<name>"
        )

    def _selections(self, context: dg.InputContext, topic: str) -> list[list[Selection]]:
        """The selections for each requested partition of the asset; a partition without events has none."""
        metadata = {name: _plain(value) for name, value in context.definition_metadata.items()}
        reads = metadata.get(READS, self.reads)
        if reads not in typing.get_args(Reads):
            raise ConfigurationError(
                f"input {context.name!r}: metadata reads is topic or materialization, not {reads!r}"
            )
        named = {AFTER, UPTO, TOPIC_PARTITION, SHARD} & metadata.keys()
        if not named:
            if context.has_asset_key and context.has_asset_partitions:
                own = _materialized_upstream(context)
                found = {key: _materialized(context, topic, key, own) for key in context.asset_partition_keys}
                _check_together(context, found)
                return list(found.values())
            if reads == "materialization":
                return [_materialized(context, topic, None, _materialized_upstream(context))]
        return [self._named_ranges(context.name, topic, metadata)]

    def _named_ranges(self, name: str, topic: str, metadata: Mapping[str, Any]) -> list[Selection]:
        shard = metadata.get(SHARD)
        shards = self.eventsql.shards if shard is None else (self.eventsql.shard(str(shard)),)
        if len(shards) > 1 and {AFTER, UPTO} & metadata.keys():
            raise ConfigurationError(
                f"input {name!r}: an offset belongs to one shard: name it in metadata shard, one of "
                f"{', '.join(str(each.name) for each in shards)}"
            )
        for each in (AFTER, UPTO, TOPIC_PARTITION):
            if each in metadata and type(metadata[each]) is not int:
                raise ConfigurationError(f"input {name!r}: metadata {each} is a whole number, not {metadata[each]!r}")
        partition = metadata.get(TOPIC_PARTITION, NOT_PARTITIONED)
        if partition != NOT_PARTITIONED:
            most = max(each.layouts.most_partitions(each.registry.topic(topic)) for each in shards)
            check_partition(topic, partition, most)
        return [self._named_range(topic, partition, metadata, each) for each in shards]

    def _named_range(self, topic: str, partition: int, metadata: Mapping[str, Any], shard: Shard) -> Selection:
        # Without `after`, the range begins with the oldest event that retention has left.
        oldest = max(0, shard.reader.floor(topic) - 1)
        after = metadata.get(AFTER, oldest)
        # An explicit end is taken as it is: events may still arrive before it.
        upto = metadata[UPTO] if UPTO in metadata else max(after, shard.reader.end(topic))
        if AFTER not in metadata and upto < after:
            # Retention dropped all of it: loading it raises `DataLossError`.
            after = 0
        return Selection(OffsetRange(topic, partition, after, upto), shard=shard.name)

    def _loader(self, annotation: Any) -> Callable[[Sequence[Selection]], Any]:
        """The method that loads events as an annotation. Raises `ConfigurationError` for another annotation."""
        from eventsql_orchestration.orchestration.frames import is_pandas_frame, is_spark_frame  # noqa: PLC0415 - pyarrow

        if annotation is Any or annotation is type(None) or is_spark_frame(annotation):
            return self._load_spark
        if is_pandas_frame(annotation):
            return self._load_pandas
        if (typing.get_origin(annotation) or annotation) in (list, Sequence):
            if typing.get_args(annotation) in ((), (Event,), (Any,)):
                return self._load_events
        elif getattr(annotation, "__module__", "").partition(".")[0] == "pyarrow":
            loaders = {"Table": self._load_arrow, "RecordBatchReader": self._load_arrow_reader}
            if (found := loaders.get(annotation.__name__)) is not None:
                return found
        raise ConfigurationError(
            f"a topic cannot be loaded as {annotation}: annotate the input as a DataFrame of Spark or pandas, "
            "pyarrow.Table, pyarrow.RecordBatchReader or list[Event]"
        )

    def _load_spark(self, selections: Sequence[Selection]) -> Any:
        # Imported here so that Java starts only for an input that needs it.
        from pyspark.sql import SparkSession  # noqa: PLC0415
        from pyspark.sql import functions as f  # noqa: PLC0415

        from eventsql_orchestration.orchestration.frames import LOADED  # noqa: PLC0415
        from eventsql_orchestration.spark import FORMAT, range_options, spark_config  # noqa: PLC0415

        session = SparkSession.getActiveSession()
        if session is None:
            session = SparkSession.Builder().config(map={**spark_config(**self.spark_config)}).getOrCreate()
        loaded = None
        for selection in selections:
            reader = session.read.format(FORMAT).options(
                **self.eventsql.spark_options(selection.shard), **range_options(selection.range)
            )
            frame = reader.options(includeHeaders="true").load() if selection.origin else reader.load()
            for name, text in selection.origin.items():
                frame = frame.where(f.col("headers")[name] == text)
            frame = frame.select(*LOADED.names)
            if selection.shard is not None:
                frame = frame.withColumn(SHARD, f.lit(selection.shard))
            loaded = frame if loaded is None else loaded.unionAll(frame)
        return loaded

    def _batches(self, selections: Sequence[Selection]) -> Iterator[tuple[str | None, list[Event]]]:
        for selection in selections:
            offsets, reader = selection.range, self.eventsql.shard(selection.shard).reader
            partition = None if offsets.partition == NOT_PARTITIONED else offsets.partition
            after = offsets.after
            for batch in reader.stream(offsets.topic, after=after, upto=offsets.upto, partition=partition):
                _check_kept(reader, replace(offsets, after=after))
                chosen = [event for event in batch if selection.has(event.metadata)] if selection.origin else batch
                yield selection.shard, chosen
                after = batch[-1].id
            _check_kept(reader, replace(offsets, after=after))

    def _load_events(self, selections: Sequence[Selection]) -> list[Event]:
        return [event for _, batch in self._batches(selections) for event in batch]

    def _load_arrow_reader(self, selections: Sequence[Selection]) -> Any:
        from eventsql_orchestration.orchestration.frames import events_as_arrow  # noqa: PLC0415 - pyarrow takes 0.2 s to load

        return events_as_arrow(self._batches(selections), shards=len(self.eventsql.platform.shards) > 1)

    def _load_arrow(self, selections: Sequence[Selection]) -> Any:
        return self._load_arrow_reader(selections).read_all()

    def _load_pandas(self, selections: Sequence[Selection]) -> Any:
        return self._load_arrow(selections).to_pandas()


def _check_kept(reader: Reader, offsets: OffsetRange) -> None:
    """Raise `DataLossError` if retention has dropped offsets of a range that was just read."""
    first, last = offsets.after + 1, min(reader.floor(offsets.topic) - 1, offsets.upto)
    if first <= last:
        raise DataLossError(
            f"retention has dropped offsets {first} to {last} of topic {offsets.topic!r}: name a later range, or load "
            "the whole topic, which begins with its oldest event"
        )


def _check_together(context: dg.InputContext, found: Mapping[str, Sequence[Selection]]) -> None:
    """Raise `ValidationError` if only some of the partitions are loaded whose events one run published together."""
    loaded: dict[tuple[str, str | None], set[str]] = {}
    for key, selections in found.items():
        for each in selections:
            together = each.origin.get(DAGSTER_PARTITION, key)
            if together != key:
                loaded.setdefault((together, each.origin.get(DAGSTER_RUN)), set()).add(key)
    for (together, run_id), keys_loaded in loaded.items():
        if keys_loaded != _partitions_of(context, together):
            raise ValidationError(
                f"run {run_id} published the events of partitions {together} of {context.asset_key.to_user_string()} "
                f"together, and only {', '.join(sorted(keys_loaded))} are loaded from it: load all of them "
                "from it, or materialize each partition in a run of its own"
            )


def _partitions_of(context: dg.InputContext, together: str) -> set[str]:
    """The partitions of a range; empty if the asset no longer has all of them."""
    first, _, last = together.partition(RANGE)
    try:
        with dg.partition_loading_context(dynamic_partitions_store=context.instance):
            return set(context.asset_partitions_def.get_partition_keys_in_range(dg.PartitionKeyRange(first, last)))
    except Exception:  # noqa: BLE001 - each kind of partitions raises errors of its own
        return set()


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, dg.MetadataValue) else value


def _materialized_upstream(context: dg.InputContext) -> dict[str | None, list[dg.AssetMaterialization]]:
    """The materializations of an input's asset by the run of its step, by partition; empty if no step gives the input.

    Another run may have materialized the asset since then. Its events are for its own steps. If the step was retried,
    each attempt may have published a part of the events.
    """
    try:
        run_id = None if context.upstream_output is None else context.upstream_output.run_id
    except dg.DagsterInvariantViolationError:
        # The asset is not computed by this run, or by a run that it executes again.
        run_id = None
    if run_id is None:
        return {}
    records = context.instance.get_records_for_run(run_id, of_type=dg.DagsterEventType.ASSET_MATERIALIZATION).records
    made = [made for record in records if (made := record.event_log_entry.asset_materialization) is not None]
    found: dict[str | None, list[dg.AssetMaterialization]] = {}
    for each in made:
        if each.asset_key == context.asset_key:
            found.setdefault(each.partition, []).append(each)
    return found


def _materialized(
    context: dg.InputContext,
    topic: str,
    partition: str | None,
    own: Mapping[str | None, Sequence[dg.AssetMaterialization]],
) -> list[Selection]:
    """The events of a materialization of an asset, or of one of its partitions; empty if it published none.

    It is the materialization in `own`, or each of them, and otherwise the last one.
    """
    what = context.asset_key.to_user_string() + ("" if partition is None else f" [{partition}]")
    found = own.get(partition, ())
    if not found:
        records = context.instance.fetch_materializations(
            dg.AssetRecordsFilter(
                asset_key=context.asset_key, asset_partitions=None if partition is None else [partition]
            ),
            limit=1,
        ).records
        found = [made for each in records if (made := each.asset_materialization) is not None]
    if not found:
        raise ValidationError(f"{what} has not been materialized: there is nothing to load")
    # An attempt that published nothing names no topic.
    published = [each for each in found if keys.PUBLISHED_TOPIC in each.metadata] or found[-1:]
    return [selection for each in published for selection in _published(each, what, topic, partition)]


def _published(
    materialization: dg.AssetMaterialization, what: str, topic: str, partition: str | None
) -> list[Selection]:
    """The events that a materialization names; empty if it published none."""
    metadata: dict[str, Any] = {name: value.value for name, value in materialization.metadata.items()}
    if metadata.get(keys.PUBLISHED_TOPIC) != topic:
        raise ValidationError(
            f"the last materialization of {what} does not name events published to topic {topic!r}: materialize it "
            "again"
        )
    if metadata.get(keys.PUBLISHED_EVENTS) == 0:
        return []
    ends = [{"first": metadata.get(keys.PUBLISHED_FIRST), "last": metadata.get(keys.PUBLISHED_LAST)}]
    ranges: list[dict[str, Any]] = metadata.get(keys.PUBLISHED_RANGES) or ends
    if any(not isinstance(each[end], int) for each in ranges for end in ("first", "last")):
        raise ValidationError(
            f"the last materialization of {what} does not name the offsets of its events, because they were not "
            "transferred or counted in time: name a range, or read the whole topic"
        )
    named = {
        DAGSTER_ASSET: metadata.get(keys.PUBLISHED_AS),
        DAGSTER_PARTITION: metadata.get(keys.PUBLISHED_FOR, partition),
        DAGSTER_RUN: metadata.get(keys.PUBLISHED_RUN),
    }
    origin = {name: text for name, text in named.items() if isinstance(text, str)}
    return [
        Selection(OffsetRange(topic, NOT_PARTITIONED, each["first"] - 1, each["last"]), origin, each.get("shard"))
        for each in ranges
    ]
