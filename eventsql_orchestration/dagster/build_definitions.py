"""A whole code location from its consumers: what every location needs beside them, put together with defaults."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import dagster as dg

from eventsql_orchestration import EventSQL, Topic
from eventsql_orchestration.dagster.alerts import Notify, build_alert_sensor
from eventsql_orchestration.dagster.backfill_asset import build_backfill
from eventsql_orchestration.dagster.checks import build_lag_check
from eventsql_orchestration.dagster.definition import ConsumerDefinition, check_distinct
from eventsql_orchestration.dagster.delivered import build_delivered_check
from eventsql_orchestration.dagster.housekeeping import build_housekeeping_schedule
from eventsql_orchestration.dagster.lag_sensor import build_lag_sensor
from eventsql_orchestration.dagster.registering import REGISTER_JOB
from eventsql_orchestration.dagster.resources import RESOURCE_KEY, EventSQLResource
from eventsql_orchestration.dagster.topics import topic_asset, topic_key
from eventsql_orchestration.dagster.transfer import build_transfer_schedule
from eventsql_orchestration.log.registration import register_topic
from eventsql_orchestration.rules import DEFAULT_SCHEMA

DSN_VARIABLE: Final = "EVENTSQL_DSN"

Prepare: TypeAlias = Callable[[EventSQL], object]
"""What makes ready what consumers write to, such as their tables. It is called again at each registration, and for each
shard, with the platform on that one by itself."""


def build_definitions(
    consumers: Sequence[ConsumerDefinition],
    *,
    topics: Sequence[Topic] = (),
    eventsql: EventSQLResource | None = None,
    resources: Mapping[str, Any] | None = None,
    dead_letters: bool = True,
    backfills: bool = False,
    prepare: Prepare | None = None,
    max_lag_events: int | None = None,
    max_lag_seconds: float | None = 300.0,
    lag_grace: float = 60.0,
    notify: Notify | None = None,
    name: str | None = None,
    platform: bool = True,
) -> dg.Definitions:
    """Everything that a location with these consumers needs, as `defs` of its module.

    Beside the consumers' assets, jobs and sensors they are: `topics` and the consumers' topics as external assets,
    where no consumer publishes to them, and with `dead_letters` the topics that take their dead letters; with
    `backfills`, the asset and the jobs of `build_backfill` for each consumer; the checks `lag` (`max_lag_events`,
    `max_lag_seconds`, `lag_grace` as in `build_lag_check`; without either number there is none) and `delivered`; the
    transfer, the lag sensor and housekeeping; with `notify`, an alert sensor; and the job `register`, which creates the
    topics and consumers. It is to be run once after each deployment that adds some. With `dead_letters`, it creates the
    topics that take them too, and it calls `prepare(platform)` before the consumers are there, for tables that they
    write to.

    The database is `eventsql`, and by default the one that `EVENTSQL_DSN` names, or the shards that it names, with the
    schema of `EVENTSQL_SCHEMA`.
    `resources` are further ones. A location may merge several such definitions: each but the first with a `name`, which
    its job and its sensors then carry (`register_<name>`, `lag_<name>`), and without `platform`, that is without the
    resource `eventsql`, the transfer, housekeeping and the assets of topics other than `topics`, with their dead
    letters. What else a location has is merged with `Definitions.merge`.

    Raises `ValidationError` for two consumers of one name, or two definitions of one consumer.
    """
    check_distinct(consumers)
    checks = [build_delivered_check(consumer) for consumer in consumers]
    if max_lag_events is not None or max_lag_seconds is not None:
        checks += [
            build_lag_check(consumer, max_events=max_lag_events, max_seconds=max_lag_seconds, grace=lag_grace)
            for consumer in consumers
        ]
    known = {topic.name: topic for topic in (*topics, *(consumer.topic for consumer in consumers))}
    published = {key for consumer in consumers for key in consumer.asset.keys}
    # Several parts may consume one topic, which can be an asset of one of them.
    external = [topic for topic in (known.values() if platform else topics) if topic_key(topic.name) not in published]
    if dead_letters:
        own = {topic.name for topic in external}
        taking = dead_letter_topics([each for each in consumers if platform or each.topic.name in own])
        external += [each for each in taking if each.name not in known and topic_key(each.name) not in published]
    replays = [build_backfill(consumer) for consumer in consumers] if backfills else []
    suffix = "" if name is None else f"_{name}"
    alerts = [build_alert_sensor(checks, notify, name=f"alerts{suffix}")] if notify is not None and checks else []
    return dg.Definitions(
        assets=[
            *(topic_asset(topic) for topic in external),
            *(consumer.asset for consumer in consumers),
            *(replay.asset for replay in replays),
        ],
        asset_checks=[check.definition for check in checks],
        jobs=[
            build_register_job(
                consumers,
                topics=list(known.values()),
                dead_letters=dead_letters,
                prepare=prepare,
                name=REGISTER_JOB + suffix,
            ),
            *{consumer.job.name: consumer.job for consumer in consumers}.values(),
            *(job for replay in replays for job in replay.jobs),
        ],
        sensors=[
            *{sensor.name: sensor for consumer in consumers for sensor in consumer.sensors}.values(),
            build_lag_sensor(consumers, checks=checks, topics=external, name=f"lag{suffix}"),
            *alerts,
        ],
        schedules=[build_transfer_schedule(), build_housekeeping_schedule(checks=checks)] if platform else [],
        resources={**({RESOURCE_KEY: eventsql or environment_resource()} if platform else {}), **(resources or {})},
    )


def dead_letter_topics(consumers: Sequence[ConsumerDefinition]) -> list[Topic]:
    """The topics that take the dead letters of these consumers, each once; the check `delivered` links to them."""
    names = dict.fromkeys(consumer.topic.dead_letter_topic for consumer in consumers)
    return [Topic(name) for name in names]


def environment_resource() -> EventSQLResource:
    """The database, or the shards, that the environment names when a run or tick uses it."""
    return EventSQLResource(dsn=dg.EnvVar(DSN_VARIABLE), db_schema=os.environ.get("EVENTSQL_SCHEMA", DEFAULT_SCHEMA))


def build_register_job(
    consumers: Sequence[ConsumerDefinition],
    *,
    topics: Sequence[Topic] = (),
    dead_letters: bool = True,
    prepare: Prepare | None = None,
    name: str = REGISTER_JOB,
) -> dg.JobDefinition:
    """A job that migrates the schema and creates topics and consumers; it can be repeated.

    A consumer that exists keeps its offsets. It takes the settings that its asset declares, and each change is in the
    run's log and in the metadata of its only step.

    With `dead_letters`, also the dead letter topic of each consumer's topic. `prepare(platform)` is called when the
    topics are there and before the consumers are, that is before anything is consumed; it must bear to be repeated.
    Raises `ValidationError` as `build_definitions`.
    """
    check_distinct(consumers)
    letters = dead_letter_topics(consumers) if dead_letters else []

    @dg.op(name=f"{name}_topics_and_consumers")
    def register(context: dg.OpExecutionContext, eventsql: EventSQLResource) -> None:
        platform = eventsql.platform
        done = [register_topic(platform.registry, topic) for topic in (*topics, *letters)]
        if prepare is not None:
            for shard in eventsql.shards:
                prepare(shard)
        done += [consumer.register(platform) for consumer in consumers]
        for each in done:
            (context.log.warning if each.changes else context.log.info)(str(each))
        context.log.info("%d topics and %d consumers are registered", len(topics), len(consumers))
        context.add_output_metadata(
            {
                "created": [each.name for each in done if each.created],
                "changed": {each.name: list(each.changes) for each in done if each.changes},
            }
        )

    @dg.job(name=name, description="Create topics and consumers, or find them.", executor_def=dg.in_process_executor)
    def registration() -> None:
        register()

    return registration
