"""The platform in Dagster: resources, topics and consumers as assets, sensors, transfer, lag, housekeeping.

Builders take keywords, and their defaults need no tuning. A code location needs an `EventSQLResource` under the name
`eventsql`, and no other resource. Definitions connect to nothing and start nothing.
"""

import importlib.util

from eventsql_orchestration.errors import MissingExtraError

if importlib.util.find_spec("dagster") is None:
    raise MissingExtraError("dagster", "eventsql_orchestration.dagster")

from eventsql_orchestration.dagster.backfills.assets import BackfillDefinition, build_backfill
from eventsql_orchestration.dagster.build_definitions import build_definitions, build_register_job
from eventsql_orchestration.dagster.component import EventSQLConsumerComponent
from eventsql_orchestration.dagster.consumers.assets import consumer_asset, range_asset
from eventsql_orchestration.dagster.consumers.definition import ClaimConfig, ConsumerDefinition
from eventsql_orchestration.dagster.consumers.options import (
    AssetOptions,
    LagLimits,
    RangeLimits,
    RunLimits,
    TickOptions,
)
from eventsql_orchestration.dagster.consumers.shared_runs import share_runs
from eventsql_orchestration.dagster.housekeeping.schedule import HistoryRetention, build_housekeeping_schedule
from eventsql_orchestration.dagster.io.io_manager import EventSQLIOManager
from eventsql_orchestration.dagster.io.publish import publish_dataframe, publish_events
from eventsql_orchestration.dagster.io.spark_progress import spark_progress
from eventsql_orchestration.dagster.launcher.run_launcher import PreforkRunLauncher
from eventsql_orchestration.dagster.lineage.origin import lineage
from eventsql_orchestration.dagster.local.instance import write_instance
from eventsql_orchestration.dagster.location_options import LocationOptions
from eventsql_orchestration.dagster.metadata_keys import PUBLISHED_EVENTS, PUBLISHED_TOPIC
from eventsql_orchestration.dagster.monitoring.alerts import CheckAlert, build_alert_sensor
from eventsql_orchestration.dagster.monitoring.checks import ConsumerCheck, ReportedCheck, build_lag_check
from eventsql_orchestration.dagster.monitoring.dead_letter_check import build_delivered_check
from eventsql_orchestration.dagster.monitoring.lag_sensor import build_lag_sensor
from eventsql_orchestration.dagster.monitoring.queues import (
    QueueCheck,
    QueueLimits,
    build_queue_checks,
    build_queue_sensor,
)
from eventsql_orchestration.dagster.monitoring.read_model_checks import build_projection_check, build_view_check
from eventsql_orchestration.dagster.monitoring.subscriptions import build_subscription_sensor
from eventsql_orchestration.dagster.monitoring.topic_page import TopicSample
from eventsql_orchestration.dagster.queues.assets import (
    WorkConfig,
    WorkerDefinition,
    queue_asset,
    queue_key,
    worker_asset,
)
from eventsql_orchestration.dagster.read_models import projection_asset, store_asset, subscription_asset, view_asset
from eventsql_orchestration.dagster.resources import EventSQLResource, TopicResource
from eventsql_orchestration.dagster.tags import DEV_TAG, SPARK_POOL
from eventsql_orchestration.dagster.topics import table_asset, topic_asset, topic_key, topic_observations
from eventsql_orchestration.dagster.transfer import build_transfer_schedule
from eventsql_orchestration.dagster.translator import EventSQLAssetProps, EventSQLTranslator
from eventsql_orchestration.orchestration.limits import WorkLimits

__all__ = [
    "DEV_TAG",
    "PUBLISHED_EVENTS",
    "PUBLISHED_TOPIC",
    "SPARK_POOL",
    "AssetOptions",
    "BackfillDefinition",
    "CheckAlert",
    "ClaimConfig",
    "ConsumerCheck",
    "ConsumerDefinition",
    "EventSQLAssetProps",
    "EventSQLConsumerComponent",
    "EventSQLIOManager",
    "EventSQLResource",
    "EventSQLTranslator",
    "HistoryRetention",
    "LagLimits",
    "LocationOptions",
    "PreforkRunLauncher",
    "QueueCheck",
    "QueueLimits",
    "RangeLimits",
    "ReportedCheck",
    "RunLimits",
    "TickOptions",
    "TopicResource",
    "TopicSample",
    "WorkConfig",
    "WorkLimits",
    "WorkerDefinition",
    "build_alert_sensor",
    "build_backfill",
    "build_definitions",
    "build_delivered_check",
    "build_housekeeping_schedule",
    "build_lag_check",
    "build_lag_sensor",
    "build_projection_check",
    "build_queue_checks",
    "build_queue_sensor",
    "build_register_job",
    "build_subscription_sensor",
    "build_transfer_schedule",
    "build_view_check",
    "consumer_asset",
    "lineage",
    "projection_asset",
    "publish_dataframe",
    "publish_events",
    "queue_asset",
    "queue_key",
    "range_asset",
    "share_runs",
    "spark_progress",
    "store_asset",
    "subscription_asset",
    "table_asset",
    "topic_asset",
    "topic_key",
    "topic_observations",
    "view_asset",
    "worker_asset",
    "write_instance",
]
