"""Triggers: one that schedules DAGs by the claims of a consumer, and one that waits for a condition."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Hashable, Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

from airflow.sdk import Asset, AssetWatcher, BaseHook
from airflow.sdk.exceptions import AirflowException, AirflowRuntimeError
from airflow.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent
from airflow.triggers.shared_stream import SharedStreamProducer

from eventsql_orchestration.airflow.assets import DEFAULT_CONNECTION, SCHEME
from eventsql_orchestration.airflow.claim_producer import ClaimProducer, Watched
from eventsql_orchestration.airflow.conditions import Condition, Found
from eventsql_orchestration.airflow.hook import EventSQLHook
from eventsql_orchestration.errors import ConfigurationError, DatabaseError
from eventsql_orchestration.model import check_topic_name
from eventsql_orchestration.orchestration.limits import RunLimits
from eventsql_orchestration.validation import check_name, check_seconds

logger = logging.getLogger(__name__)


class EventSQLTrigger(BaseEventTrigger):
    """Schedules DAGs by claims of a consumer: one asset event for each range of a partition.

    Use it in an `AssetWatcher`, or as `MessageQueueTrigger(scheme="eventsql", …)`. The payload is a `ClaimEvent`. A
    DAG that the asset schedules consumes its claims with `EventSQLConsumeOperator` or `@task.eventsql_consume`.

    - `min_events`, `max_wait`: claim when `min_events` events wait, or when the first has waited `max_wait` seconds.
    - `max_events`: the most events of a claim.
    - `start_timeout`: the most seconds that a claim waits for a task to start; then its events are claimed again. The
      first claim of events waits for a minute, each further claim twice as long. A late task takes over the newest
      claim.
    - `poll_interval`: seconds between two looks without a notification of the database.

    Watchers with the same arguments share one claimer. Raises `ValidationError`.
    """

    def __init__(
        self,
        *,
        topic: str,
        consumer: str,
        eventsql_conn_id: str = DEFAULT_CONNECTION,
        min_events: int = 1,
        max_events: int = 10_000,
        max_wait: float = 5.0,
        start_timeout: float = 900.0,
        poll_interval: float = 1.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Airflow annotates it in part
        self.topic = check_topic_name(topic)
        self.consumer = check_name("consumer name", consumer)
        self.eventsql_conn_id = eventsql_conn_id
        self.limits = RunLimits(min_events=min_events, max_events=max_events, max_wait=max_wait)
        self.start_timeout = check_seconds("start_timeout", start_timeout, zero=False)
        self.poll_interval = check_seconds("poll_interval", poll_interval, zero=False)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.{type(self).__name__}", self._arguments()

    def _arguments(self) -> dict[str, Any]:
        return {
            "topic": self.topic,
            "consumer": self.consumer,
            "eventsql_conn_id": self.eventsql_conn_id,
            "min_events": self.limits.min_events,
            "max_events": self.limits.max_events,
            "max_wait": self.limits.max_wait,
            "start_timeout": self.start_timeout,
            "poll_interval": self.poll_interval,
        }

    def shared_stream_key(self) -> Hashable:
        return ("eventsql", *self._arguments().values())

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        return cls(**kwargs).producer()

    def producer(self) -> ClaimProducer:
        """The producer that claims for this trigger and for the triggers that share its stream."""
        return ClaimProducer(
            Watched(self.topic, self.consumer, self.limits), self._open_hook,
            start_timeout=self.start_timeout, poll_interval=self.poll_interval,
        )  # fmt: skip

    async def _open_hook(self) -> EventSQLHook:
        return await open_hook(self.eventsql_conn_id)

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for payload in shared_stream:
            yield TriggerEvent(payload)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Claim without a shared stream: each claim keeps its first lease, as nothing reports that it is stored."""
        producer = self.producer()
        async for payload, _ in producer.open_stream():
            yield TriggerEvent(payload)


def claims_asset(topic: str, consumer: str, *, eventsql_conn_id: str = DEFAULT_CONNECTION, **options: Any) -> Asset:
    """The asset of a consumer's claims, `eventsql://<connection>/<topic>/<consumer>`: a schedule for the consuming DAG.

    Its watcher has an `EventSQLTrigger` with these `options`. A consumer has an asset of its own, because an event of
    a topic's asset would run the DAGs of all consumers. Raises `ValidationError`.
    """
    trigger = EventSQLTrigger(topic=topic, consumer=consumer, eventsql_conn_id=eventsql_conn_id, **options)
    name = f"{topic}/{quote(consumer, safe='')}"
    return Asset(
        name=name, uri=f"{SCHEME}://{eventsql_conn_id}/{name}", watchers=[AssetWatcher(name=name, trigger=trigger)]
    )


class EventSQLConditionTrigger(BaseTrigger):
    """Waits until a `Condition` holds, for a deferred `EventSQLSensor`. Looks every `poll_interval` seconds."""

    def __init__(self, *, condition: Mapping[str, Any], eventsql_conn_id: str, poll_interval: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Airflow annotates it in part
        self.condition = dict(condition)
        self.eventsql_conn_id = eventsql_conn_id
        self.poll_interval = poll_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.{type(self).__name__}", {
            "condition": self.condition,
            "eventsql_conn_id": self.eventsql_conn_id,
            "poll_interval": self.poll_interval,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        condition = Condition(**self.condition)
        hook = await open_hook(self.eventsql_conn_id)
        while True:
            try:
                found = await asyncio.to_thread(look, condition, hook)
            except DatabaseError as error:
                logger.warning("%s: looks again in %.0f s: %s", condition, self.poll_interval, error)
            else:
                if found.holds:
                    yield TriggerEvent(asdict(found))
                    return
            await asyncio.sleep(self.poll_interval)


def look(condition: Condition, hook: EventSQLHook) -> Found:
    """Look, and disconnect: otherwise, each sensor that waits would keep a connection to the server."""
    with hook:
        return condition.look(hook.shards)


async def open_hook(conn_id: str) -> EventSQLHook:
    """The hook of a connection that is looked up in a trigger. Raises `ConfigurationError`."""
    try:
        connection = await BaseHook.aget_connection(conn_id)
    except (AirflowException, AirflowRuntimeError) as error:
        raise ConfigurationError(f"Airflow gives no connection {conn_id!r}: {error}") from error
    return EventSQLHook(conn_id, connection=connection)
