"""Floor 5: the platform in Dagster: resources, topics and consumers as assets, sensors, transfer, lag, housekeeping.

Builders take keywords and have defaults that need no tuning; the one thing that a code location must provide is an
`EventSQLResource` under the name `eventsql`. Nothing connects or starts when it is defined.
"""

import importlib.util

from eventsql_orchestration.errors import MissingExtraError

if importlib.util.find_spec("dagster") is None:
    raise MissingExtraError("dagster", "eventsql_orchestration.dagster")

from eventsql_orchestration.dagster.alerts import CheckAlert, build_alert_sensor
from eventsql_orchestration.dagster.assembly import build_definitions, build_register_job
from eventsql_orchestration.dagster.backfill_asset import BackfillDefinition, build_backfill
from eventsql_orchestration.dagster.checks import ConsumerCheck, build_lag_check
from eventsql_orchestration.dagster.component import EventSQLConsumerComponent
from eventsql_orchestration.dagster.consumers import consumer_asset, range_asset
from eventsql_orchestration.dagster.definition import ClaimConfig, ConsumerDefinition, Limits
from eventsql_orchestration.dagster.delivered import build_delivered_check
from eventsql_orchestration.dagster.housekeeping import build_housekeeping_schedule
from eventsql_orchestration.dagster.instance import write_instance
from eventsql_orchestration.dagster.io_manager import EventSQLIOManager
from eventsql_orchestration.dagster.lag_sensor import build_lag_sensor
from eventsql_orchestration.dagster.lineage import lineage
from eventsql_orchestration.dagster.metadata import PUBLISHED_EVENTS, PUBLISHED_TOPIC
from eventsql_orchestration.dagster.progress import spark_progress
from eventsql_orchestration.dagster.publishing import publish_dataframe, publish_events
from eventsql_orchestration.dagster.resources import EventSQLResource, TopicResource
from eventsql_orchestration.dagster.sharing import share_runs
from eventsql_orchestration.dagster.tags import SPARK_POOL
from eventsql_orchestration.dagster.topics import topic_asset, topic_key, topic_observations
from eventsql_orchestration.dagster.transfer import build_transfer_schedule

__all__ = [
    "PUBLISHED_EVENTS",
    "PUBLISHED_TOPIC",
    "SPARK_POOL",
    "BackfillDefinition",
    "CheckAlert",
    "ClaimConfig",
    "ConsumerCheck",
    "ConsumerDefinition",
    "EventSQLConsumerComponent",
    "EventSQLIOManager",
    "EventSQLResource",
    "Limits",
    "TopicResource",
    "build_alert_sensor",
    "build_backfill",
    "build_definitions",
    "build_delivered_check",
    "build_housekeeping_schedule",
    "build_lag_check",
    "build_lag_sensor",
    "build_register_job",
    "build_transfer_schedule",
    "consumer_asset",
    "lineage",
    "publish_dataframe",
    "publish_events",
    "range_asset",
    "share_runs",
    "spark_progress",
    "topic_asset",
    "topic_key",
    "topic_observations",
    "write_instance",
]
