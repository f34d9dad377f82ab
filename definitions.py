"""The reference location, which a team forks: topics, assets, consumers, checks, sensors and schedules."""

import os

import dagster as dg
from dagster_pyspark import LazyPySparkResource

from assets.churn import pipeline as churn
from assets.churn.effects import DIRECTORY_CHURN, FILE_CHANGES
from assets.rides import answers, fares, projections, simulation, utilisation
from assets.rides.commands import RIDE_ANSWERS
from assets.rides.effects import DRIVER_UTILISATION, ZONE_FARES
from assets.rides.order import RIDE_ORDERS
from assets.tables import prepare
from eventsql_orchestration import Topic
from eventsql_orchestration.dagster import (
    DEV_TAG,
    EventSQLResource,
    build_alert_sensor,
    build_backfill,
    build_delivered_check,
    build_housekeeping_schedule,
    build_lag_check,
    build_lag_sensor,
    build_queue_checks,
    build_queue_sensor,
    build_register_job,
    build_transfer_schedule,
    share_runs,
    topic_asset,
)
from eventsql_orchestration.spark import spark_config
from sensors import notify

TOPICS = [RIDE_ORDERS, ZONE_FARES, DRIVER_UTILISATION, RIDE_ANSWERS, FILE_CHANGES, DIRECTORY_CHURN]

# These take less time to work than their runs, and a Spark session, take to start.
zone_fares, driver_utilisation, directory_churn = share_runs(
    "consume_with_spark", [fares.zone_fares, utilisation.driver_utilisation, churn.directory_churn]
)
zone_fares_table, driver_utilisation_table, directory_churn_table = share_runs(
    "consume_sums", [fares.zone_fares_table, utilisation.driver_utilisation_table, churn.directory_churn_table]
)

CONSUMERS = [
    projections.order_status,
    zone_fares,
    zone_fares_table,
    driver_utilisation,
    driver_utilisation_table,
    directory_churn,
    directory_churn_table,
]

WORKERS = [answers.ride_charges]

SOURCES = [simulation.ride_orders, churn.file_changes]

CHECKS = [
    projections.order_status_matches_log,
    fares.zone_fares_table_matches_log,
    utilisation.driver_utilisation_table_matches_log,
    answers.ride_charges_match_log,
    churn.directory_churn_table_matches_log,
]

eventsql = EventSQLResource(dsn=dg.EnvVar("EVENTSQL_DSN"), db_schema=os.environ.get("EVENTSQL_SCHEMA", "eventsql"))

# The sensors `lag` and `queues` evaluate these by themselves.
CONSUMER_CHECKS = [
    *(build_lag_check(consumer, max_events=100_000, max_seconds=300.0, grace=60.0) for consumer in CONSUMERS),
    *(build_delivered_check(consumer) for consumer in CONSUMERS),
]

QUEUE_CHECKS = [check for queue in answers.QUEUES for check in build_queue_checks(queue)]

REPORTED_CHECKS = [*CONSUMER_CHECKS, *QUEUE_CHECKS]

# They take the events that a consumer has given up; its check links to them.
DEAD_LETTER_TOPICS = [Topic(name) for name in dict.fromkeys(each.topic.dead_letter_topic for each in CONSUMERS)]

BACKFILLS = [build_backfill(consumer) for consumer in CONSUMERS]

defs = dg.Definitions(
    assets=[
        *SOURCES,
        *(topic_asset(topic) for topic in DEAD_LETTER_TOPICS),
        *(consumer.asset for consumer in CONSUMERS),
        *answers.QUEUES,
        *(worker.asset for worker in WORKERS),
        *(backfill.asset for backfill in BACKFILLS),
    ],
    asset_checks=[*CHECKS, *(check.definition for check in REPORTED_CHECKS)],
    jobs=[
        # Run it after each deployment.
        build_register_job(CONSUMERS, topics=TOPICS, workers=WORKERS, prepare=prepare),
        dg.define_asset_job(
            "simulation",
            selection=SOURCES,
            description="Publishes events to look at: orders of rides, and the history of a git repository.",
            tags={DEV_TAG: "simulation"},
        ),
        dg.define_asset_job(
            "verification",
            selection=dg.AssetSelection.all_asset_checks(),
            description="Evaluates every check now: lag, dead letters, and the tables against the log.",
            tags={DEV_TAG: "verification"},
        ),
        *(consumer.job for consumer in CONSUMERS),
        *(worker.job for worker in WORKERS),
        *(job for backfill in BACKFILLS for job in backfill.jobs),
    ],
    sensors=[
        *(sensor for consumer in CONSUMERS for sensor in consumer.sensors),
        *(worker.sensor for worker in WORKERS),
        build_lag_sensor(CONSUMERS, checks=CONSUMER_CHECKS, topics=DEAD_LETTER_TOPICS),
        build_queue_sensor(answers.QUEUES, checks=QUEUE_CHECKS),
        build_alert_sensor([*REPORTED_CHECKS, *CHECKS], notify),
    ],
    schedules=[build_transfer_schedule(), build_housekeeping_schedule(checks=REPORTED_CHECKS)],
    # A step's own process would take longer to start than to work. Assets that somebody materializes together have one
    # Spark session, one after the other, and not one each at once.
    executor=dg.in_process_executor,
    resources={"eventsql": eventsql, "spark": LazyPySparkResource(spark_config=spark_config())},
)
