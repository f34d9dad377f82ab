"""The job that makes a database ready for the reference location. Run it after each deployment; it is idempotent."""

from collections.abc import Sequence

import dagster as dg

from assets.tables import prepare
from eventsql_orchestration import Topic
from eventsql_orchestration.dagster import ConsumerDefinition, WorkerDefinition, build_register_job


def build_setup_job(
    *, topics: Sequence[Topic], consumers: Sequence[ConsumerDefinition], workers: Sequence[WorkerDefinition]
) -> dg.JobDefinition:
    """A job that migrates the schema, registers topics, consumers and queues, and creates the location's own tables and
    views.

    Each topic that is consumed gets one for its dead letters: without one, an event that always fails blocks it.
    """
    return build_register_job(consumers, topics=topics, prepare=prepare, name="setup", workers=workers)
