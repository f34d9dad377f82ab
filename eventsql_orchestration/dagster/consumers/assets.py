"""Consumers as assets: from a function over events to an asset, its job and its sensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias, get_args

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Consumer, Shard, Topic
from eventsql_orchestration.consumer import DeclaredFilter
from eventsql_orchestration.dagster.consumers.consumer_tick import ConsumerWatch
from eventsql_orchestration.dagster.consumers.definition import (
    ClaimConfig,
    Computation,
    ConsumerDefinition,
    MakeConsume,
)
from eventsql_orchestration.dagster.consumers.options import (
    DEFAULT_TICKS,
    AssetOptions,
    RangeLimits,
    RunLimits,
    TickOptions,
)
from eventsql_orchestration.dagster.consumers.reporting import storable
from eventsql_orchestration.dagster.consumers.run import ConsumerStep
from eventsql_orchestration.dagster.consumers.sensors import build_sensor
from eventsql_orchestration.dagster.consumers.user_function import UserFunction
from eventsql_orchestration.dagster.metadata_keys import CONSUMED_TOPIC
from eventsql_orchestration.dagster.steps import job_of_assets, step_of_assets
from eventsql_orchestration.dagster.tags import CONSUMER_RUN, CONSUMER_TAG, SPARK_POOL, TOPIC_TAG
from eventsql_orchestration.dagster.topics import published_topics, topic_key
from eventsql_orchestration.dagster.translator import translated
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.orchestration.batch import BatchConsumer, RangeConsumer
from eventsql_orchestration.orchestration.drain import Consume
from eventsql_orchestration.orchestration.tracebacks import Tracebacks
from eventsql_orchestration.topics.positions import Start, starting_at
from eventsql_orchestration.validation import check_kind, check_whole

SPARK_KIND: Final = "pyspark"

SensorPer: TypeAlias = Literal["partition", "consumer"]
"""Whether each partition or each consumer has its own sensor."""

MOST_PARTITION_SENSORS: Final = 4
"""Up to this number of partitions, each partition of a consumer has its own sensor by default. In a location, three
ticks linger at once on two cores, and five on four cores or more (`long_poll.at_once`). With more sensors, events wait
for a sensor's turn."""

Decorator: TypeAlias = Callable[[Callable[..., Any]], ConsumerDefinition]

DEFAULT_LIMITS: Final = RunLimits()
DEFAULT_RANGE_LIMITS: Final = RangeLimits()
DEFAULT_OPTIONS: Final = AssetOptions()


def consumer_asset(
    *,
    topic: Topic,
    consumer: str,
    partitioned: bool = False,
    name: str | None = None,
    batch: int = 1_000,
    max_attempts: int | None = None,
    filter: DeclaredFilter = None,  # noqa: A002 - the usual word
    start: Start = "earliest",
    limits: RunLimits = DEFAULT_LIMITS,
    options: AssetOptions = DEFAULT_OPTIONS,
    sensor: SensorPer | None = None,
    ticks: TickOptions = DEFAULT_TICKS,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> Decorator:
    """Make a consumer from a function `f(events, connection)`. Each call gets at most `batch` events.

    Writes through `connection` commit together with the offset: exactly once. Other effects happen at least once. The
    function may also take `context` (of the run), and resources as parameters annotated with their types. It returns
    None: anything else is dropped with a warning. An event that fails is tried again with backoff, up to `max_attempts`
    times. Then it becomes a dead letter if topic `<topic>_dlt` exists, and otherwise blocks its partition.

    With a `filter`, the function gets only the events that match. A new consumer begins at `start`, as in
    `Registry.register_consumer`. The job `register` gives an existing consumer the declared `max_attempts` and
    `filter`, and logs each change. None leaves a setting as it is, and `filter=EVERY_EVENT` removes a filter.

    The asset's name is `name` (by default the function's name), and the job's name is `consume_<name>`. With
    `sensor="partition"`, each partition has its own sensor, which can be watched and stopped by itself. With
    `"consumer"`, one sensor looks at all partitions with one statement. By default, up to four partitions have a sensor
    each, and more partitions share one sensor (docs/dagster_runs.md). Raises `ValidationError` or
    `DagsterInvalidDefinitionError` at definition.
    """
    check_kind("topic", topic, Topic)
    check_whole("batch", batch, least=1)
    declared = _Declared(
        topic, Consumer(topic.name, consumer, partitioned), name, max_attempts, filter, start, limits, options, sensor,
        ticks, default_status,
    )  # fmt: skip

    def decorate(function: Callable[..., Any]) -> ConsumerDefinition:
        user = UserFunction.of(function, "events", "connection")

        def consume(context: dg.AssetExecutionContext, shard: Shard, resources: Mapping[str, Any]) -> Consume:
            call = partial(user, resources, context=context)
            tracebacks = Tracebacks(context.log)
            return BatchConsumer(
                shard, lambda events, on: call(events=events, connection=on), batch, limits.lease, tracebacks
            )

        return declared.define(user, consume)

    return decorate


def range_asset(
    *,
    topic: Topic,
    consumer: str,
    publishes: Topic | str | Sequence[Topic | str] = (),
    partitioned: bool = False,
    name: str | None = None,
    max_attempts: int | None = None,
    filter: DeclaredFilter = None,  # noqa: A002 - the usual word
    start: Start = "earliest",
    limits: RunLimits = DEFAULT_RANGE_LIMITS,
    options: AssetOptions = DEFAULT_OPTIONS,
    sensor: SensorPer | None = None,
    ticks: TickOptions = DEFAULT_TICKS,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> Decorator:
    """Make a consumer from a function `f(context, claim)` over a whole range of offsets, for example a Spark job.

    The function reads `claim.remaining`, and commits the claim itself together with its effects:
    `publish_dataframe(…, claim=claim)`, or `claims.check` and `claims.commit` in its transaction. It may also take
    resources, as parameters annotated with their types. It returns None or a mapping with metadata of the run; an entry
    that Dagster cannot store is left out with a warning. When the function raises, or ends without a commit, the run
    fails and its range is tried again after a pause, up to `max_attempts` times. Then the partition stops there,
    because no single event is known to be at fault. If topic `<topic>_dlt` exists, the range is tried once a minute
    instead.

    With a `filter`, Spark's option `claim` reads only the events that match. Any other reader gets all events of the
    range.

    The topics in `publishes` become assets of the same run. The job `register` creates each topic that is given as a
    `Topic`. A topic that is given by its name has to exist. The other parameters are those of `consumer_asset`, with
    `RangeLimits`.
    """
    check_kind("topic", topic, Topic)
    check_kind("options", options, AssetOptions)
    if options.kinds is None:
        options = replace(options, kinds=(SPARK_KIND,))
    if options.pool is None and SPARK_KIND in (options.kinds or ()):
        options = replace(options, pool=SPARK_POOL)
    declared = _Declared(
        topic, Consumer(topic.name, consumer, partitioned), name, max_attempts, filter, start, limits, options, sensor,
        ticks, default_status, published_topics(publishes),
    )  # fmt: skip

    def decorate(function: Callable[..., Any]) -> ConsumerDefinition:
        user = UserFunction.of(function, "claim")

        def consume(context: dg.AssetExecutionContext, shard: Shard, resources: Mapping[str, Any]) -> Consume:
            call = partial(user, resources, context=context)
            return RangeConsumer(shard, lambda claim: storable(call(claim=claim), context.log), context.log)

        return declared.define(user, consume)

    return decorate


@dataclass(frozen=True)
class _Declared:
    """The arguments of a consumer's decorator. Raises `ValidationError`."""

    topic: Topic
    consumer: Consumer
    name: str | None
    max_attempts: int | None
    filter: DeclaredFilter
    start: Start
    limits: RunLimits
    options: AssetOptions
    sensor: SensorPer | None
    ticks: TickOptions
    default_status: dg.DefaultSensorStatus
    publishes: tuple[Topic | str, ...] = ()

    def __post_init__(self) -> None:
        if self.sensor is not None and self.sensor not in get_args(SensorPer):
            raise ValidationError(f"sensor is one of {', '.join(map(repr, get_args(SensorPer)))}, not {self.sensor!r}")
        if self.max_attempts is not None:
            check_whole("max_attempts", self.max_attempts, least=1, most=2**31 - 1)
        check_kind("filter", self.filter, DeclaredFilter)
        check_kind("limits", self.limits, RunLimits)
        check_kind("options", self.options, AssetOptions)
        check_kind("ticks", self.ticks, TickOptions)
        starting_at(self.start)
        if self.consumer.partitioned and not self.topic.partitioned:
            raise ValidationError(
                f"consumer {self.consumer.name!r} cannot be partitioned: topic {self.topic.name!r} is not partitioned; "
                f"leave out partitioned=True, or declare partitions, as in Topic({self.topic.name!r}, partitions=4)"
            )
        self.options.check_retries(self.limits.lease)

    def define(self, user: UserFunction, make_consume: MakeConsume) -> ConsumerDefinition:
        """Make the consumer from its function."""
        name = self.name or user.call.__name__
        specs = self._specs(name, user.call.__doc__)
        key, *publishes = [spec.key for spec in specs]
        computation = Computation(user, make_consume, tuple(publishes))
        step = ConsumerStep(self.topic, self.consumer, self.limits, key, computation)

        asset = step_of_assets(
            name, specs, user.as_compute(ClaimConfig, step), pool=self.options.pool,
            retry_policy=self.options.retry_policy,
        )  # fmt: skip
        job = job_of_assets(
            f"consume_{name}",
            (key, *publishes),
            description=f"Consumes topic {self.topic.name} as {self.consumer.name}, a claimed range at a time.",
            tags={
                TOPIC_TAG: self.topic.name,
                CONSUMER_TAG: self.consumer.name,
                **CONSUMER_RUN,
                **(self.options.tags or {}),
            },
        )
        return ConsumerDefinition(
            self.topic, self.consumer, asset, job, self._sensors(name, job), key, self.limits, self.max_attempts,
            self.filter, self.start, tuple(each for each in self.publishes if isinstance(each, Topic)), computation,
        )  # fmt: skip

    def _specs(self, name: str, docstring: str | None) -> list[dg.AssetSpec]:
        """The consumer's asset, and the assets of the topics that it publishes to."""
        metadata = {
            CONSUMED_TOPIC: self.topic.name,
            "consumer": self.consumer.name,
            "partitions": len(self.topic.all_partitions) if self.consumer.partitioned else 1,
        }
        spec = self.options.spec(name, docstring, deps=[topic_key(self.topic.name)], metadata=metadata)
        own = translated(self.options.translator, self.topic.name, self.consumer.name, spec)
        own = own.replace_attributes(skippable=True)
        return [own, *(self.options.published(each, name, own.key) for each in self.publishes)]

    def _sensors(self, name: str, job: dg.UnresolvedAssetJobDefinition) -> tuple[dg.SensorDefinition, ...]:
        """One sensor with the job's name, or a sensor for each partition, with the partition's number in its name."""
        whole = ConsumerWatch(self.topic, self.consumer, name, self.limits, job.name, self.ticks)
        few = not self.consumer.partitioned or len(self.topic.all_partitions) <= MOST_PARTITION_SENSORS
        if (self.sensor or ("partition" if few else "consumer")) == "consumer":
            return (build_sensor(whole, job, self.default_status),)
        if not self.consumer.partitioned:
            return (build_sensor(replace(whole, partition=NOT_PARTITIONED), job, self.default_status),)
        return tuple(
            build_sensor(replace(whole, partition=each, sensor=f"{job.name}_{each}"), job, self.default_status)
            for each in self.topic.all_partitions
        )
