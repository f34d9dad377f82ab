"""The job that makes a database ready for the reference location. Run it after each deployment; it is idempotent."""

from collections.abc import Sequence

import dagster as dg

from assets import tables
from assets.rides.effects import CHANGES_PER_MINUTE, ORDER_TIMELINE
from eventsql_orchestration import Shard, Topic
from eventsql_orchestration.dagster import ConsumerDefinition, build_register_job
from eventsql_orchestration.views import Views


def build_setup_job(*, topics: Sequence[Topic], consumers: Sequence[ConsumerDefinition]) -> dg.JobDefinition:
    """A job that migrates the schema, registers topics and consumers, and creates the location's own tables and views.

    Each topic that is consumed gets one for its dead letters: without one, an event that always fails blocks it.
    """
    return build_register_job(consumers, topics=topics, prepare=_prepare, name="setup")


def _prepare(shard: Shard) -> None:
    tables.create(shard.database)
    Views(shard.database).declare(ORDER_TIMELINE, CHANGES_PER_MINUTE)
