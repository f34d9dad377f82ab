"""Floor 5: the platform in Dagster: resources, topics and consumers as assets, sensors, transfer, lag, housekeeping.

Builders take keywords and have defaults that need no tuning; the one thing that a code location must provide is an
`EventSQLResource` under the name `eventsql`. Nothing connects or starts when it is defined.
"""

import importlib.util

from eventsql_orchestration.errors import MissingExtraError

if importlib.util.find_spec("dagster") is None:
    raise MissingExtraError("dagster", "eventsql_orchestration.dagster")

from eventsql_orchestration.dagster.checks import build_lag_check
from eventsql_orchestration.dagster.consumers import consumer_asset, range_asset
from eventsql_orchestration.dagster.definition import ClaimConfig, ConsumerDefinition, Limits
from eventsql_orchestration.dagster.housekeeping import build_housekeeping_schedule
from eventsql_orchestration.dagster.instance import write_instance
from eventsql_orchestration.dagster.lag import build_lag_sensor
from eventsql_orchestration.dagster.lineage import lineage
from eventsql_orchestration.dagster.publishing import PUBLISHED_EVENTS, PUBLISHED_TOPIC, publish_dataframe
from eventsql_orchestration.dagster.resources import EventSQLResource, TopicResource
from eventsql_orchestration.dagster.tags import SPARK_TAG
from eventsql_orchestration.dagster.topics import topic_asset, topic_key
from eventsql_orchestration.dagster.transfer import build_transfer_schedule

__all__ = [
    "PUBLISHED_EVENTS",
    "PUBLISHED_TOPIC",
    "SPARK_TAG",
    "ClaimConfig",
    "ConsumerDefinition",
    "EventSQLResource",
    "Limits",
    "TopicResource",
    "build_housekeeping_schedule",
    "build_lag_check",
    "build_lag_sensor",
    "build_transfer_schedule",
    "consumer_asset",
    "lineage",
    "publish_dataframe",
    "range_asset",
    "topic_asset",
    "topic_key",
    "write_instance",
]
