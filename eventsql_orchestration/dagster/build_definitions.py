"""Builds a whole code location from its consumers: adds everything else that a location needs, with defaults."""

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Final, Unpack

import dagster as dg

from eventsql_orchestration import Topic
from eventsql_orchestration.consuming.handlers import check_handler, check_returned
from eventsql_orchestration.dagster.backfills.assets import build_backfill
from eventsql_orchestration.dagster.consumers.definition import ConsumerDefinition, check_distinct
from eventsql_orchestration.dagster.consumers.options import LagLimits
from eventsql_orchestration.dagster.housekeeping.schedule import build_housekeeping_schedule
from eventsql_orchestration.dagster.io.io_manager import TOPIC
from eventsql_orchestration.dagster.location_options import (
    DEFAULT_LOCATION,
    GivenAsset,
    LocationFields,
    LocationOptions,
    Prepare,
)
from eventsql_orchestration.dagster.monitoring.alerts import build_alert_sensor
from eventsql_orchestration.dagster.monitoring.checks import ConsumerCheck, build_lag_check
from eventsql_orchestration.dagster.monitoring.dead_letter_check import build_delivered_check
from eventsql_orchestration.dagster.monitoring.lag_sensor import build_lag_sensor
from eventsql_orchestration.dagster.monitoring.queues import build_queue_checks, build_queue_sensor
from eventsql_orchestration.dagster.queues.assets import WorkerDefinition, queue_asset, queues_of
from eventsql_orchestration.dagster.register import REGISTER_JOB, undeclared, undeclared_consumer
from eventsql_orchestration.dagster.resources import RESOURCE_KEY, EventSQLResource
from eventsql_orchestration.dagster.tags import DEV_SETUP, DEV_TAG
from eventsql_orchestration.dagster.topics import topic_asset, topic_key
from eventsql_orchestration.dagster.transfer import build_transfer_schedule
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.topics.registration import Registration
from eventsql_orchestration.validation import DEFAULT_SCHEMA, counted

DSN_VARIABLE: Final = "EVENTSQL_DSN"


def build_definitions(
    consumers: Sequence[ConsumerDefinition],
    options: LocationOptions = DEFAULT_LOCATION,
    **fields: Unpack[LocationFields],
) -> dg.Definitions:
    """Everything that a code location with these consumers needs, for the variable `defs` of its module.

    - The consumers' assets, jobs and sensors; with `backfills`, the asset and the jobs of `build_backfill` for each.
    - As external assets: the topics to which no consumer publishes, and with `dead_letters` their dead letter topics.
    - The checks `lag` (none if `lag` is None) and `delivered`; with `notify`, an alert sensor.
    - With `workers`, their assets, jobs and sensors, their queues as external assets, and the sensor `queues`.
    - The transfer, the lag sensor and housekeeping, and the job `register` (`build_register_job`). Run that job once
      after each deployment that adds topics or consumers.
    - The resource `eventsql`, by default `environment_resource()`, and the other parts that `LocationOptions` names.

    Each field of `LocationOptions` is also a keyword, which overrides the field of `options`:
    `build_definitions([ledger], prepare=create_table)`. A location may merge several of these definitions. Give each
    one except the first a `name` and `platform=False`. Raises `ValidationError` if two consumers have the same name, a
    consumer is defined twice, a topic is declared with two different numbers of partitions, or two assets publish to
    one topic.
    """
    check_distinct(consumers)
    chosen = replace(options, **fields)
    checks = consumer_checks(consumers, chosen.lag)
    return dg.Definitions.merge(
        definitions_of(consumers, checks, backfills=chosen.backfills), common_definitions(consumers, checks, chosen)
    )


def common_definitions(
    consumers: Sequence[ConsumerDefinition], checks: Sequence[ConsumerCheck], options: LocationOptions
) -> dg.Definitions:
    """Definitions that consumers share: topics, registration, lag, alerts, and with `platform` the rest of a location.

    `checks` are the checks of the consumers. The fields `lag` and `backfills` of the options are not used here.
    """
    queue_names = queues_of(options.workers)
    _check_publishers(consumers, options.workers)
    suffix = "" if options.name is None else f"_{options.name}"
    known = list({each.name: each for each in (*options.topics, *(consumer.topic for consumer in consumers))}.values())
    # Several merged definitions may consume the same topic, but the topic has one asset.
    external = _external(
        [*(each.asset for each in consumers), *(each.asset for each in options.workers), *options.assets],
        known if options.platform else options.topics,
        dead_letter_topics(consumers) if options.dead_letters else [],
    )
    register = build_register_job(
        consumers,
        topics=options.topics,
        dead_letters=options.dead_letters,
        prepare=options.prepare,
        name=REGISTER_JOB + suffix,
        workers=options.workers,
    )
    given = {spec.key for spec in _specs(options.assets)}
    queues = [queue_asset(name, translator=options.translator) for name in queue_names]
    limits = options.queue_lag
    queue_checks = [] if limits is None else [each for spec in queues for each in build_queue_checks(spec, limits)]
    all_checks = [*checks, *queue_checks]

    sensors = [build_lag_sensor(consumers, checks=checks, topics=external, sample=options.sample, name=f"lag{suffix}")]
    if queues:
        sensors.append(build_queue_sensor(queues, checks=queue_checks, name=f"queues{suffix}"))
    if options.notify is not None and all_checks:
        sensors.append(build_alert_sensor(all_checks, options.notify, name=f"alerts{suffix}"))

    resources = dict(options.resources or {})
    schedules: list[dg.ScheduleDefinition] = []
    if options.platform:
        resources = {RESOURCE_KEY: options.eventsql or environment_resource(), **resources}
        schedules = [build_transfer_schedule(), build_housekeeping_schedule(options.history, checks=all_checks)]
    return dg.Definitions(
        assets=[
            *options.assets,
            *(queue for queue in queues if queue.key not in given),
            *(worker.asset for worker in options.workers),
            *_topic_assets(external, given, options),
        ],
        asset_checks=[check.definition for check in queue_checks],
        jobs=[register, *(worker.job for worker in options.workers)],
        sensors=[*sensors, *(worker.sensor for worker in options.workers)],
        schedules=schedules,
        resources=resources,
    )


def _topic_assets(
    topics: Sequence[Topic], given: Collection[dg.AssetKey], options: LocationOptions
) -> list[dg.AssetSpec]:
    """Assets of topics, downstream of the assets that publish to them. A topic whose key is `given` is left out."""
    sources = _publishers(options.assets)
    return [
        topic_asset(each, deps=sources.get(each.name, ()), translator=options.translator)
        for each in topics
        if topic_key(each.name) not in given
    ]


def definitions_of(
    consumers: Sequence[ConsumerDefinition], checks: Sequence[ConsumerCheck], *, backfills: bool
) -> dg.Definitions:
    """The consumers' assets, jobs, sensors and checks; with `backfills`, also those of `build_backfill`."""
    replays = [build_backfill(consumer) for consumer in consumers] if backfills else []
    # Consumers that share their runs share a job and a sensor.
    own_jobs = {each.job.name: each.job for each in consumers}.values()
    own_sensors = {sensor.name: sensor for each in consumers for sensor in each.sensors}.values()
    return dg.Definitions(
        assets=[*(each.asset for each in consumers), *(each.asset for each in replays)],
        asset_checks=[check.definition for check in checks],
        jobs=[*own_jobs, *(job for replay in replays for job in replay.jobs)],
        sensors=list(own_sensors),
    )


def consumer_checks(consumers: Sequence[ConsumerDefinition], lag: LagLimits | None) -> list[ConsumerCheck]:
    """The check `delivered` of each consumer, and the check `lag` unless `lag` is None."""
    checks = [build_delivered_check(consumer) for consumer in consumers]
    if lag is not None:
        checks += [build_lag_check(consumer, **asdict(lag)) for consumer in consumers]
    return checks


def _check_publishers(consumers: Sequence[ConsumerDefinition], workers: Sequence[WorkerDefinition]) -> None:
    """Refuse two assets that publish to one topic: in Dagster, only one of them can have the topic as its output.

    Raises `ValidationError`.
    """
    publishers: dict[dg.AssetKey, str] = {}
    assets = [(each.key, each.asset) for each in consumers] + [(each.key, each.asset) for each in workers]
    for key, asset in assets:
        name = key.to_user_string()
        for topic in asset.keys - {key}:
            if (other := publishers.setdefault(topic, name)) != name:
                raise ValidationError(
                    f"{other!r} and {name!r} both publish to topic {topic.path[-1]!r}, and in Dagster only one of them "
                    "can have the topic as its output: leave `publishes` out of both, publish in their functions, and "
                    "name both in topic_asset(…, deps=[…])"
                )


def _external(assets: Sequence[GivenAsset], topics: Sequence[Topic], letters: Sequence[Topic]) -> list[Topic]:
    """The topics that are external assets: none of the `assets` of the location computes them.

    Also the dead letter topics of these topics, which are among `letters`.
    """
    computed = [each for each in assets if isinstance(each, dg.AssetsDefinition) and each.is_executable]
    published = {key for each in computed for key in each.keys}
    names = {topic.dead_letter_topic for topic in topics}
    each_once = {topic.name: topic for topic in (*(each for each in letters if each.name in names), *topics)}
    return [topic for topic in each_once.values() if topic_key(topic.name) not in published]


def _declared(
    consumers: Sequence[ConsumerDefinition], topics: Sequence[Topic], workers: Sequence[WorkerDefinition]
) -> list[Topic]:
    """The topics of consumers, the topics that consumers and workers publish to, and further topics, each once.

    Raises `ValidationError` if a topic is declared with two different numbers of partitions.
    """
    named = dict[str, Topic]()
    published = [topic for consumer in consumers for topic in consumer.publishes]
    published += [topic for worker in workers for topic in worker.publishes]
    for topic in (*published, *topics, *(consumer.topic for consumer in consumers)):
        other = named.setdefault(topic.name, topic)
        if other.partitions != topic.partitions:
            raise ValidationError(
                f"topic {topic.name!r} is declared with partitions={other.partitions} and with "
                f"partitions={topic.partitions} (-1: none): give both places the same Topic"
            )
        named[topic.name] = topic
    return list(named.values())


def _specs(assets: Sequence[GivenAsset]) -> Iterator[dg.AssetSpec]:
    for each in assets:
        yield from [each] if isinstance(each, dg.AssetSpec) else each.specs


def _publishers(assets: Sequence[GivenAsset]) -> Mapping[str, list[dg.AssetKey]]:
    """The assets whose metadata names the topic that they publish to, by topic."""
    found: dict[str, list[dg.AssetKey]] = {}
    for spec in _specs(assets):
        named = spec.metadata.get(TOPIC)
        name = named.value if isinstance(named, dg.MetadataValue) else named
        if isinstance(name, str) and spec.key != topic_key(name):
            found.setdefault(name, []).append(spec.key)
    return found


def dead_letter_topics(consumers: Sequence[ConsumerDefinition]) -> list[Topic]:
    """The dead letter topics of these consumers, each once; the check `delivered` links to them."""
    return [Topic(name) for name in dict.fromkeys(consumer.topic.dead_letter_topic for consumer in consumers)]


def environment_resource() -> EventSQLResource:
    """The resource for the database, or the shards, in `EVENTSQL_DSN`, which is read when a run or tick begins.

    The schema in `EVENTSQL_SCHEMA` is read when this function is called, so when the location is loaded.
    """
    return EventSQLResource(dsn=dg.EnvVar(DSN_VARIABLE), db_schema=os.environ.get("EVENTSQL_SCHEMA", DEFAULT_SCHEMA))


def build_register_job(
    consumers: Sequence[ConsumerDefinition],
    *,
    topics: Sequence[Topic] = (),
    dead_letters: bool = True,
    prepare: Prepare | None = None,
    name: str = REGISTER_JOB,
    workers: Sequence[WorkerDefinition] = (),
) -> dg.JobDefinition:
    """A job that migrates the schema and creates topics, consumers, and the queues of workers. It can be repeated.

    It creates the topics of consumers, the topics that consumers and workers publish to, and `topics`. An existing
    topic gets the declared retention. If it has events or consumers and another number of partitions than declared, the
    run fails with `RedefinitionError`, unless the declared number is the one before a repartitioning. An existing
    consumer keeps its offsets and gets the settings that its asset declares. An existing queue gets the options that
    its worker declares. The run's log and the metadata of its only step show each change. They also name each
    registered consumer of these topics that this location does not declare, such as a consumer that was removed from
    the location.

    With `dead_letters`, the job also creates the dead letter topic of each consumer's topic: as it is declared, or
    without partitions. It calls `prepare(shard)` after it creates the topics and before it creates the consumers, so
    before anything is consumed. `prepare` must be repeatable. Raises `ValidationError` as `build_definitions` does, and
    for a `prepare` that cannot be called in this way.
    """
    check_distinct(consumers)
    queues_of(workers)
    if prepare is not None:
        check_handler(prepare, "shard")
    declared = _declared(consumers, topics, workers)
    names = {topic.name for topic in declared}
    letters = [each for each in dead_letter_topics(consumers) if dead_letters and each.name not in names]

    @dg.op(name=f"{name}_topics_and_consumers")
    def register(context: dg.OpExecutionContext, eventsql: EventSQLResource) -> None:
        platform = eventsql.platform
        done = [platform.registry.declare_topic(topic) for topic in (*declared, *letters)]
        if prepare is not None:
            for shard in eventsql.shards:
                check_returned(prepare(shard))
        done += [consumer.register(platform) for consumer in consumers]
        for worker in workers:
            worker.register(platform)
            context.log.info("queue %r is ready", worker.queue)
        numbers = counted(len(declared), "topic"), counted(len(consumers), "consumer")
        context.log.info("%s and %s are registered", *numbers)
        _report(context, done, undeclared(platform, declared, [each.consumer for each in consumers]))

    @dg.job(
        name=name,
        description="Creates topics, consumers and queues, and gives them their declared settings.",
        executor_def=dg.in_process_executor,
        tags={DEV_TAG: DEV_SETUP},
    )
    def registration() -> None:
        register()

    return registration


def _report(context: dg.OpExecutionContext, done: Sequence[Registration], others: Sequence[tuple[str, str]]) -> None:
    """Log each registration, and each of the `others`: registered consumers that the location does not declare."""
    for each in done:
        context.log.log(logging.WARNING if each.changes or each.outdated else logging.INFO, "%s", each)
    for topic, consumer in others:
        context.log.info("%s", undeclared_consumer(topic, consumer))
    context.add_output_metadata({
        "created": [each.name for each in done if each.created],
        "changed": {each.name: list(each.changes) for each in done if each.changes},
        "not declared here": [" ".join(each) for each in others],
    })  # fmt: skip
