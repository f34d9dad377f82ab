"""Consumers as assets: from a function over events to an asset, its job and a sensor for each partition."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias, get_args

import dagster as dg

from eventsql_orchestration import NOT_PARTITIONED, Consumer, EventSQL, Topic
from eventsql_orchestration.dagster.batches import BatchConsumer, Consumed
from eventsql_orchestration.dagster.definition import (
    ClaimConfig,
    Computation,
    ConsumerDefinition,
    Limits,
)
from eventsql_orchestration.dagster.draining import Consume, Drained, Draining, owner_of_run
from eventsql_orchestration.dagster.functions import UserFunction
from eventsql_orchestration.dagster.handover import comes_soon
from eventsql_orchestration.dagster.metadata import CONSUMED_TOPIC
from eventsql_orchestration.dagster.published import add_up
from eventsql_orchestration.dagster.registering import why_unregistered
from eventsql_orchestration.dagster.reporting import metadata_of, report
from eventsql_orchestration.dagster.resources import RESOURCE_KEY, EventSQLResource
from eventsql_orchestration.dagster.sensors import build_consumer_sensor, build_partition_sensor
from eventsql_orchestration.dagster.steps import drain
from eventsql_orchestration.dagster.tags import (
    CONSUMER_TAG,
    HOUSEKEEPING_CONSUMER,
    HOUSEKEEPING_TAG,
    SHARED_TAG,
    SPARK_POOL,
    TOPIC_TAG,
    pool_tags,
)
from eventsql_orchestration.dagster.topics import KINDS, topic_key
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConsumerNotFoundError,
    DatabaseError,
    TopicNotFoundError,
    ValidationError,
)
from eventsql_orchestration.log.claims import Claim
from eventsql_orchestration.log.consumption import Failure
from eventsql_orchestration.log.positions import Start, starting_at
from eventsql_orchestration.log.registry import check_filter
from eventsql_orchestration.model import DeclaredFilter
from eventsql_orchestration.rules import check_whole

Dependency: TypeAlias = dg.AssetKey | dg.AssetSpec | dg.AssetsDefinition | str
SPARK_KIND: Final = "pyspark"

SensorPer: TypeAlias = Literal["partition", "consumer"]
"""What has a sensor of its own."""

Decorator: TypeAlias = Callable[[Callable[..., Any]], ConsumerDefinition]


def consumer_asset(
    *,
    topic: Topic,
    consumer: str,
    partitioned: bool = False,
    name: str | None = None,
    min_events: int = 1,
    max_events: int = 10_000,
    max_wait: float = 5.0,
    drain_seconds: float = 20.0,
    drain_events: int = 1_000_000,
    drain_idle: float = 1.0,
    lease: float = 60.0,
    batch: int = 1_000,
    max_attempts: int | None = None,
    filter: DeclaredFilter = None,  # noqa: A002 - the field's word
    start: Start = "earliest",
    retry_policy: dg.RetryPolicy | None = None,
    deps: Iterable[Dependency] = (),
    group_name: str = "consumers",
    description: str | None = None,
    owners: Sequence[str] = (),
    tags: Mapping[str, str] | None = None,
    pool: str | None = None,
    sensor: SensorPer = "partition",
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> Decorator:
    """Make a consumer of a function `f(events, connection)` over a batch of events.

    What it writes through `connection` commits together with the offset: exactly once. Anything else it does happens
    at least once. It may also take `context` (of the run) and resources, as parameters annotated with their types. When
    it raises, the event that fails is tried again, with backoff, up to `max_attempts` times, and then becomes a dead
    letter where topic `<topic>_dlt` exists, and blocks its partition where not.

    Each partition's sensor requests a run when `min_events` wait, or fewer have waited `max_wait` seconds; its range
    has at most `max_events`. The run hands them over `batch` at a time and then goes on with what has come meanwhile:
    for `drain_seconds`, up to `drain_events`, until nothing has come for `drain_idle` seconds. `lease` is how many
    seconds after the death of a run's process its partition is consumed again, where Dagster does not see it sooner.

    `sensor` says how ticks are shared out: a sensor for each `"partition"`, which can be looked at and stopped by
    itself, or one for the whole `"consumer"`, which looks at all partitions with one statement: Dagster takes some 7
    sensors a second on two cores, so take the latter from some 30 partitions on (docs/dagster.md).

    With a `filter`, the function gets the events that match. `start` is where a new consumer begins, as in
    `Registry.register_consumer`: it says nothing to a consumer that exists. The job `register` gives a consumer that
    exists the `max_attempts` and the `filter` that are declared here, and logs each change. One that is None stays as
    it is in the database, where a new consumer has 5 attempts and no filter; `filter=EVERY_EVENT` ends a filter.

    `retry_policy` is Dagster's, for what is no event's fault, such as a database that is away: the run goes on with
    its claim from the offset reached. An event that fails has its `max_attempts`, whatever the policy.

    The asset is called `name` (the function's name by default), the job `consume_<name>`. `tags` go to its runs; `pool`
    is the pool of Dagster's that limits them (docs/operations.md): `SPARK_POOL` where the function starts a session.

    Raises `ValidationError` or `DagsterInvalidDefinitionError` at definition.
    """
    limits = Limits(min_events, max_events, max_wait, drain_seconds, drain_events, drain_idle, lease, batch)

    def decorate(function: Callable[..., Any]) -> ConsumerDefinition:
        user = UserFunction.of(function, required=("events", "connection"), optional=("context",))

        def consume(context: dg.AssetExecutionContext, platform: EventSQL, resources: Mapping[str, Any]) -> Consume:
            return BatchConsumer(
                platform,
                lambda events, connection: user(resources, events=events, connection=connection, context=context),
                limits,
            )

        return _define(
            user, consume,
            topic=topic, consumer=Consumer(topic.name, consumer, partitioned), name=name or function.__name__,
            limits=limits, max_attempts=max_attempts, filter=filter, start=start,
            retry_policy=retry_policy, publishes=(), deps=deps,
            group_name=group_name,
            description=description or function.__doc__, owners=owners, tags=tags or {}, pool=pool,
            kinds=KINDS, sensor=sensor, default_status=default_status,
        )  # fmt: skip

    return decorate


def range_asset(
    *,
    topic: Topic,
    consumer: str,
    publishes: Topic | str | Sequence[Topic | str] = (),
    partitioned: bool = False,
    name: str | None = None,
    min_events: int = 1,
    max_events: int = 100_000,
    max_wait: float = 5.0,
    drain_seconds: float = 20.0,
    drain_events: int = 10_000_000,
    drain_idle: float = 1.0,
    lease: float = 60.0,
    max_attempts: int | None = None,
    filter: DeclaredFilter = None,  # noqa: A002 - the field's word
    start: Start = "earliest",
    retry_policy: dg.RetryPolicy | None = None,
    deps: Iterable[Dependency] = (),
    group_name: str = "consumers",
    description: str | None = None,
    owners: Sequence[str] = (),
    kinds: Collection[str] = (SPARK_KIND,),
    tags: Mapping[str, str] | None = None,
    pool: str | None = None,
    sensor: SensorPer = "partition",
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> Decorator:
    """Make a consumer of a function `f(context, claim)` over a whole range of offsets, such as a Spark job.

    The function reads `claim.remaining`, and commits the claim itself together with its effects:
    `publish_dataframe(…, claim=claim)`, or `claims.check` and `claims.commit` in its transaction. It may also take
    resources, as parameters annotated with their types. What it returns, a mapping or None, is the run's metadata. When
    it raises, or ends without a commit, the run fails and its range is tried again after a pause, up to `max_attempts`
    times; then the partition stops there, since no one event is known to be at fault. Where topic `<topic>_dlt` exists
    it does not stop, and is tried once a minute.

    With a `filter`, Spark's option `claim` reads the events that match. Any other reader gets all events of the range.

    The topics that it `publishes` to become assets of the same run. One of kind `pyspark` is in the `SPARK_POOL` where
    no other `pool` is named. Otherwise as `consumer_asset`.
    """
    limits = Limits(min_events, max_events, max_wait, drain_seconds, drain_events, drain_idle, lease)
    published = [publishes] if isinstance(publishes, Topic | str) else list(publishes)

    def decorate(function: Callable[..., Any]) -> ConsumerDefinition:
        user = UserFunction.of(function, required=("claim",), optional=("context",))

        def consume(context: dg.AssetExecutionContext, platform: EventSQL, resources: Mapping[str, Any]) -> Consume:
            def consume_range(claim: Claim) -> Consumed:
                try:
                    metadata = user(resources, claim=claim, context=context)
                    _require_commit(platform, claim)
                except (ClaimLostError, DatabaseError):
                    # No fault of the range: the next tick claims it again, whenever the database is there.
                    raise
                except Exception as error:
                    _give_up(context, platform, claim, error)
                    if retry_policy is None or isinstance(error, dg.Failure):
                        raise
                    # Its range is given back: a retry would find nothing to do, and the run would have succeeded.
                    raise dg.Failure(
                        f"{claim} failed and is given back: {type(error).__name__}: {error}", allow_retries=False
                    ) from error
                return Consumed(claim.events, metadata=dict(metadata or {}))

            return consume_range

        return _define(
            user, consume,
            topic=topic, consumer=Consumer(topic.name, consumer, partitioned), name=name or function.__name__,
            limits=limits, max_attempts=max_attempts, filter=filter, start=start,
            retry_policy=retry_policy, publishes=published, deps=deps,
            group_name=group_name,
            description=description or function.__doc__, owners=owners, tags=tags or {},
            pool=pool or (SPARK_POOL if SPARK_KIND in kinds else None),
            kinds=(*KINDS, *kinds), sensor=sensor, default_status=default_status,
        )  # fmt: skip

    return decorate


class NotCommittedError(dg.Failure):
    """A range asset's function ended and had not committed its claim."""

    def __init__(self, claim: Claim) -> None:
        super().__init__(
            f"{claim} was not committed: publish with publish_dataframe(…, claim=claim), or commit it with "
            "claims.commit in the transaction of the effects",
            allow_retries=False,
        )


def _require_commit(platform: EventSQL, claim: Claim) -> None:
    _, state = platform.claims.get(claim.id)
    if state != "committed":
        raise NotCommittedError(claim)


def _give_up(context: dg.AssetExecutionContext, platform: EventSQL, claim: Claim, error: Exception) -> None:
    """Give a range back whose function failed, to be tried again after a pause, up to the consumer's attempts."""
    failure = platform.claims.fail(claim, error)
    if failure is not None:
        # Where something takes dead letters, a partition waits for no one to resume it.
        blocked = failure.outcome == Failure.BLOCKED and not platform.dead_letters.accepts(claim.range.topic)
        context.log.error(
            "%s failed, attempt %d: %s",
            claim,
            failure.attempts,
            f"its partition stops here until `eventsql consumer resume {claim.range.topic} {claim.consumer}`"
            if blocked
            else "it is tried again after a pause",
        )


_MakeConsume: TypeAlias = Callable[[dg.AssetExecutionContext, EventSQL, Mapping[str, Any]], Consume]


def _define(
    user: UserFunction,
    make_consume: _MakeConsume,
    *,
    topic: Topic,
    consumer: Consumer,
    name: str,
    limits: Limits,
    max_attempts: int | None,
    filter: DeclaredFilter,  # noqa: A002 - the field's word
    start: Start,
    retry_policy: dg.RetryPolicy | None,
    publishes: Sequence[Topic | str],
    deps: Iterable[Dependency],
    group_name: str,
    description: str | None,
    owners: Sequence[str],
    kinds: Iterable[str],
    tags: Mapping[str, str],
    pool: str | None,
    sensor: SensorPer,
    default_status: dg.DefaultSensorStatus,
) -> ConsumerDefinition:
    if sensor not in get_args(SensorPer):
        raise ValidationError(f"sensor is one of {', '.join(map(repr, get_args(SensorPer)))}, not {sensor!r}")
    if max_attempts is not None:
        check_whole("max_attempts", max_attempts, least=1)
    check_filter(filter)
    starting_at(start)
    key = dg.AssetKey([name])
    partitions = topic.all_partitions if consumer.partitioned else (NOT_PARTITIONED,)
    spec = dg.AssetSpec(
        key=key,
        # A step of a shared run that finds nothing to consume materializes nothing.
        skippable=True,
        deps=[topic_key(topic.name), *deps],
        description=description,
        group_name=group_name,
        owners=list(owners),
        kinds=set(kinds),
        metadata={CONSUMED_TOPIC: topic.name, "consumer": consumer.name, "partitions": len(partitions)},
    )
    published = [
        dg.AssetSpec(
            key=topic_key(each.name if isinstance(each, Topic) else each),
            skippable=True,
            deps=[key],
            description=f"Events that {name} publishes.",
            group_name=group_name,
            owners=list(owners),
            kinds=set(KINDS),
            metadata={"partitions": each.partitions} if isinstance(each, Topic) else {},
        )
        for each in publishes
    ]

    def results(drained: Drained) -> Iterator[tuple[dg.AssetKey, dict[str, Any]]]:
        topics = {each.key.path[-1] for each in published}
        yield key, metadata_of(consumer, drained, without=topics)
        for each in published:
            yield each.key, add_up(drained.said, each.key.path[-1])

    def compute(context: dg.AssetExecutionContext, config: ClaimConfig, resources: Mapping[str, Any]) -> Any:
        eventsql: EventSQLResource = resources[RESOURCE_KEY]
        # A shared run does not wait for more: the others have their turn, and nothing would show that it lives.
        bounds = replace(limits, drain_idle=0.0) if SHARED_TAG in context.run.tags else limits
        owner, drained = owner_of_run(context.run.run_id), Drained()

        def on(shard: EventSQL) -> Draining:
            return Draining(
                shard, make_consume(context, shard, resources), bounds,
                owner=owner, drained=drained,
                successor_comes=partial(comes_soon, context.run.run_id, context.instance),
            )  # fmt: skip

        try:
            try:
                drain(context, eventsql, on, config, consumer)
            except (ConsumerNotFoundError, TopicNotFoundError) as error:
                if (why := why_unregistered(eventsql.platform, topic, consumer)) is None:
                    raise
                raise dg.Failure(why, allow_retries=False) from error
            report(context, key, consumer, drained, eventsql.platform.dead_letters)
        except BaseException:
            # What a failing run has consumed is committed, and belongs to the history of its assets as any other.
            if drained.events:
                for each, metadata in results(drained):
                    context.log_event(dg.AssetMaterialization(asset_key=each, metadata=metadata))
            raise
        if config.claim is None and SHARED_TAG in context.run.tags and not drained.claims:
            return
        for each, metadata in results(drained):
            yield dg.MaterializeResult(asset_key=each, metadata=metadata)

    asset = dg.multi_asset(
        name=name, specs=[spec, *published], retry_policy=retry_policy, pool=pool, op_tags=pool_tags(pool)
    )(user.as_compute(ClaimConfig, compute))
    job = dg.define_asset_job(
        f"consume_{name}",
        selection=dg.AssetSelection.assets(key, *(each.key for each in published)).without_checks(),
        description=f"Consumes topic {topic.name} as {consumer.name}, a claimed range at a time.",
        # Measured: 1.4 s from the request to the first step, 2.5 s with a process for each step.
        executor_def=dg.in_process_executor,
        tags={
            TOPIC_TAG: topic.name,
            CONSUMER_TAG: consumer.name,
            HOUSEKEEPING_TAG: HOUSEKEEPING_CONSUMER,
            **tags,
        },
    )
    watched: Any = {
        "topic": topic, "consumer": consumer, "job": job, "op_name": name, "limits": limits,
        "default_status": default_status,
    }  # fmt: skip
    sensors: tuple[dg.SensorDefinition, ...]
    if sensor == "consumer":
        sensors = (build_consumer_sensor(**watched),)
    else:
        sensors = tuple(build_partition_sensor(partition=partition, **watched) for partition in partitions)
    return ConsumerDefinition(
        topic, consumer, asset, job, sensors, key, limits, max_attempts, filter, start,
        computation=Computation(user, make_consume, tuple(each.key for each in published)),
    )  # fmt: skip
