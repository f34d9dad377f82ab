"""A whole code location from its consumers: what every location needs beside them, put together with defaults."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import dagster as dg

from eventsql_orchestration import Topic
from eventsql_orchestration.dagster.alerts import Notify, build_alert_sensor
from eventsql_orchestration.dagster.checks import build_delivered_check, build_lag_check
from eventsql_orchestration.dagster.definition import ConsumerDefinition
from eventsql_orchestration.dagster.housekeeping import build_housekeeping_schedule
from eventsql_orchestration.dagster.lag_sensor import build_lag_sensor
from eventsql_orchestration.dagster.resources import RESOURCE_KEY, EventSQLResource
from eventsql_orchestration.dagster.topics import topic_asset, topic_key
from eventsql_orchestration.dagster.transfer import build_transfer_schedule
from eventsql_orchestration.rules import DEFAULT_SCHEMA

REGISTER_JOB: Final = "register"
DSN_VARIABLE: Final = "EVENTSQL_DSN"


def build_definitions(
    consumers: Sequence[ConsumerDefinition],
    *,
    topics: Sequence[Topic] = (),
    eventsql: EventSQLResource | None = None,
    resources: Mapping[str, Any] | None = None,
    dead_letters: bool = True,
    max_lag_events: int | None = None,
    max_lag_seconds: float | None = 300.0,
    lag_grace: float = 60.0,
    notify: Notify | None = None,
    name: str | None = None,
    platform: bool = True,
) -> dg.Definitions:
    """Everything that a location with these consumers needs, as `defs` of its module.

    Beside the consumers' assets, jobs and sensors they are: `topics` and the consumers' topics as external assets,
    where no consumer publishes to them; the checks `lag` (`max_lag_events`, `max_lag_seconds`, `lag_grace` as in
    `build_lag_check`; without either number there is none) and `delivered`; the transfer, the lag sensor and
    housekeeping; with `notify`, an alert sensor; and the job `register`, which creates the topics and consumers. It is
    to be run once after each deployment that adds some. With `dead_letters`, it creates the topics that take them too.

    The database is `eventsql`, and by default the one that `EVENTSQL_DSN` names, with the schema of `EVENTSQL_SCHEMA`.
    `resources` are further ones. A location may merge several such definitions: each but the first with a `name`, which
    its job and its sensors then carry (`register_<name>`, `lag_<name>`), and without `platform`, that is without the
    resource `eventsql`, the transfer, housekeeping and the assets of topics other than `topics`. What else a location
    has is merged with `Definitions.merge`.
    """
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
    suffix = "" if name is None else f"_{name}"
    alerts = [build_alert_sensor(checks, notify, name=f"alerts{suffix}")] if notify is not None and checks else []
    return dg.Definitions(
        assets=[*(topic_asset(topic) for topic in external), *(consumer.asset for consumer in consumers)],
        asset_checks=[check.definition for check in checks],
        jobs=[
            build_register_job(
                consumers, topics=list(known.values()), dead_letters=dead_letters, name=REGISTER_JOB + suffix
            ),
            *{consumer.job.name: consumer.job for consumer in consumers}.values(),
        ],
        sensors=[
            *{sensor.name: sensor for consumer in consumers for sensor in consumer.sensors}.values(),
            build_lag_sensor(consumers, checks=checks, topics=external, name=f"lag{suffix}"),
            *alerts,
        ],
        schedules=[build_transfer_schedule(), build_housekeeping_schedule(checks=checks)] if platform else [],
        resources={**({RESOURCE_KEY: eventsql or environment_resource()} if platform else {}), **(resources or {})},
    )


def environment_resource() -> EventSQLResource:
    """The database that the environment names when a run or tick uses it."""
    return EventSQLResource(dsn=dg.EnvVar(DSN_VARIABLE), db_schema=os.environ.get("EVENTSQL_SCHEMA", DEFAULT_SCHEMA))


def build_register_job(
    consumers: Sequence[ConsumerDefinition],
    *,
    topics: Sequence[Topic] = (),
    dead_letters: bool = True,
    name: str = REGISTER_JOB,
) -> dg.JobDefinition:
    """A job that migrates the schema and creates topics and consumers, or finds them as they are; it can be repeated.

    With `dead_letters`, also the dead letter topic of each consumer's topic.
    """

    @dg.op(name=f"{name}_topics_and_consumers")
    def register(context: dg.OpExecutionContext, eventsql: EventSQLResource) -> None:
        registry = eventsql.platform.registry
        for topic in topics:
            registry.register_topic(topic)
        for consumer in consumers:
            consumer.register(eventsql.platform)
            if dead_letters:
                registry.register_topic(Topic(consumer.topic.dead_letter_topic))
        context.log.info("%d topics and %d consumers are registered", len(topics), len(consumers))

    @dg.job(name=name, description="Create topics and consumers, or find them.", executor_def=dg.in_process_executor)
    def registration() -> None:
        register()

    return registration
