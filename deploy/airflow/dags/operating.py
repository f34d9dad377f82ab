"""Operating the reference location in Airflow: its setup, checks of its tables, and the lag of its consumers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowFailException

from assets.churn.effects import DIRECTORY_CHURN, FILE_CHANGES
from assets.rides.effects import DRIVER_UTILISATION, ZONE_FARES
from assets.rides.order import RIDE_ORDERS
from eventsql_orchestration import Consumer, Topic
from eventsql_orchestration.airflow import EventSQLHook, EventSQLLagOperator

TOPICS: Final = (RIDE_ORDERS, ZONE_FARES, DRIVER_UTILISATION, FILE_CHANGES, DIRECTORY_CHURN)

CONSUMERS: Final = (
    Consumer(RIDE_ORDERS.name, "order_status", partitioned=True),
    Consumer(RIDE_ORDERS.name, "zone_fares"),
    Consumer(RIDE_ORDERS.name, "driver_utilisation"),
    Consumer(FILE_CHANGES.name, "directory_churn"),
    Consumer(ZONE_FARES.name, "zone_fares_table", partitioned=True),
    Consumer(DRIVER_UTILISATION.name, "driver_utilisation_table", partitioned=True),
    Consumer(DIRECTORY_CHURN.name, "directory_churn_table", partitioned=True),
)

with DAG("setup", schedule=None, catchup=False, tags=["eventsql:setup"]):

    @task
    def topics_and_consumers() -> list[str]:
        """Create topics, consumers and the location's own tables, or find them; gives those that are new.

        Run it after each deployment. Each topic gets one for its dead letters: without one, an event that always fails
        blocks its consumer.
        """
        # SQLAlchemy takes long to import.
        from assets.tables import prepare  # noqa: PLC0415

        with EventSQLHook() as hook:
            registry = hook.platform.registry
            done = [registry.declare_topic(topic) for topic in TOPICS]
            done += [registry.declare_topic(Topic(topic.dead_letter_topic)) for topic in TOPICS]
            for shard in hook.shards:
                prepare(shard)
            done += [registry.declare_consumer(consumer) for consumer in CONSUMERS]
        return [each.name for each in done if each.created]

    topics_and_consumers()

with DAG("verification", schedule=None, catchup=False, tags=["eventsql:verification"]):

    @task
    def matches_log(table: str) -> dict[str, Any]:
        """A table holds what plain Python computes over the whole log, without Spark and without the consumers."""
        from assets.churn.verification import directory_churn_matches_log  # noqa: PLC0415
        from assets.rides import verification  # noqa: PLC0415

        checks = {
            "order_status": verification.order_status_matches_log,
            "zone_fares_table": verification.zone_fares_match_log,
            "driver_utilisation_table": verification.driver_utilisation_matches_log,
            "directory_churn_table": directory_churn_matches_log,
        }
        with EventSQLHook() as hook:
            found = checks[table](hook.platform)
        if not found.passed:
            raise AirflowFailException(f"{table} does not match the log: {dict(found.figures)}")
        return dict(found.figures)

    for name in ("order_status", "zone_fares_table", "driver_utilisation_table", "directory_churn_table"):
        matches_log.override(task_id=f"{name}_matches_log")(name)

with DAG("lag", schedule=timedelta(minutes=5), catchup=False, max_active_runs=1, tags=["eventsql"]):
    EventSQLLagOperator(
        task_id="all_consumers", max_events=100_000, max_seconds=300.0, retries=1, retry_delay=timedelta(minutes=1)
    )
