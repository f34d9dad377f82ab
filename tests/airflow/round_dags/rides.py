"""A location for `eventsql dev --dags`: a DAG for each of its tags, and one that consumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow.sdk import DAG, Param, task
from airflow.sdk.exceptions import AirflowFailException

from eventsql_orchestration import Connection, Consumer, Event, Topic
from eventsql_orchestration.airflow import (
    EventSQLHook,
    EventSQLPublishOperator,
    claims_asset,
    eventsql_consume,
)

with DAG("setup", schedule=None, tags=["eventsql:setup"]):

    @task
    def create() -> None:
        """Create the topic, the consumer and its table."""
        with EventSQLHook() as hook:
            hook.platform.registry.register_topic(Topic("rides"))
            hook.platform.registry.register_consumer(Consumer("rides", "billing"))
            with hook.platform.database.transaction() as connection:
                connection.execute("CREATE TABLE IF NOT EXISTS bill (ride text)")

    create()

with DAG("simulation", schedule=None, params={"orders": Param(5, type="integer")}, tags=["eventsql:simulation"]):

    def rides(context: Mapping[str, Any]) -> list[str]:
        """So many rides as the parameter says."""
        return [str(number) for number in range(context["params"]["orders"])]

    EventSQLPublishOperator(task_id="publish", topic="rides", events=rides)

with DAG("billing", schedule=[claims_asset("rides", "billing", max_wait=0.5)], default_args={"retries": 2}):

    @eventsql_consume(topic="rides", consumer="billing")
    def bill(events: Sequence[Event], connection: Connection) -> None:
        """Record each ride."""
        with connection.cursor() as cursor:
            cursor.executemany("INSERT INTO bill (ride) VALUES (%s)", [(event.value.decode(),) for event in events])

    bill()

with DAG("verification", schedule=None, tags=["eventsql:verification"]):

    @task
    def every_ride_is_billed_once() -> int:
        """Compare the table with the log."""
        with EventSQLHook() as hook, hook.platform.database.transaction() as connection:
            row = connection.execute("SELECT count(*), count(DISTINCT ride) FROM bill").fetchone()
            logged = hook.platform.reader.count("rides")
        if row != (logged, logged):
            raise AirflowFailException(f"{logged} rides are in the log, and {row} in the table")
        return logged

    every_ride_is_billed_once()
