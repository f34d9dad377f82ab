"""The DAGs that `eventsql bench airflow` measures. The environment of Airflow's processes describes them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from airflow.providers.common.messaging.triggers.msg_queue import MessageQueueTrigger
from airflow.sdk import DAG, Asset, AssetWatcher, task
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from eventsql_orchestration.airflow import claims_asset, eventsql_consume
from eventsql_orchestration.bench.airflow_process import (
    CONSUMER,
    DIRECTORY,
    LINES,
    MESSAGES,
    PUBLISHED,
    TOPIC,
    WITH_REDIS,
)
from eventsql_orchestration.bench.airflow_redis import CHANNEL
from eventsql_orchestration.database import Connection
from eventsql_orchestration.model import Event

directory, topic = Path(os.environ[DIRECTORY]), os.environ[TOPIC]


class LineTrigger(BaseEventTrigger):
    """An event for each new line of a file. It looks every 10 ms."""

    def __init__(self, *, path: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Airflow annotates it in part
        self.path = path

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.{type(self).__name__}", {"path": self.path}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        seen = 0
        while True:
            lines = _lines(Path(self.path))
            for line in lines[seen:]:
                yield TriggerEvent(line)
            seen = len(lines)
            await asyncio.sleep(0.01)


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def record(name: str) -> None:
    """Write down when the first instruction of a task ran."""
    now = time.time()
    with (directory / name).open("a", encoding="utf-8") as file:
        file.write(f"{now}\n")


with DAG("bench_published", schedule=[claims_asset(topic, CONSUMER, max_wait=0.0)], catchup=False) as published:

    @eventsql_consume(topic=topic, consumer=CONSUMER)
    def consume(events: Sequence[Event], connection: Connection) -> None:  # noqa: ARG001 - what consumers take
        record(PUBLISHED)

    consume()


def noting(name: str, watchers: list[AssetWatcher]) -> DAG:
    """A DAG that a watcher runs, and that records the time."""
    with DAG(f"bench_{name}", schedule=[Asset(f"bench_{name}", watchers=watchers)], catchup=False) as dag:

        @task
        def note() -> None:
            record(name)

        note()
    return dag


line_trigger = LineTrigger(path=str(directory / f"{LINES}.in"))
lines = noting(LINES, [AssetWatcher(name=LINES, trigger=line_trigger)])

messages = None
if os.environ[WITH_REDIS]:
    # Its own pause between two looks is 60 s.
    redis_trigger = MessageQueueTrigger(scheme="redis+pubsub", channels=[CHANNEL], poll_interval=0.01)
    messages = noting(MESSAGES, [AssetWatcher(name=MESSAGES, trigger=redis_trigger)])
