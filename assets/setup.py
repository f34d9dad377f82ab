"""The job that makes a database ready for the reference location. Run it after each deployment; it is idempotent."""

from collections.abc import Sequence

import dagster as dg

from assets import tables
from eventsql_orchestration import Topic
from eventsql_orchestration.dagster import ConsumerDefinition, EventSQLResource


def build_setup_job(*, topics: Sequence[Topic], consumers: Sequence[ConsumerDefinition]) -> dg.JobDefinition:
    """A job that migrates the schema, registers topics and consumers, and creates the location's own tables."""

    @dg.op(name="prepare")
    def prepare(context: dg.OpExecutionContext, eventsql: EventSQLResource) -> None:
        platform = eventsql.platform
        for topic in topics:
            platform.registry.register_topic(topic)
        for definition in consumers:
            definition.register(platform)
        tables.create(platform.database)
        context.log.info("%d topics and %d consumers are registered", len(topics), len(consumers))

    @dg.job(
        name="setup",
        description="Migrate the schema, register topics and consumers, create the location's tables.",
        executor_def=dg.in_process_executor,
    )
    def setup() -> None:
        prepare()

    return setup
