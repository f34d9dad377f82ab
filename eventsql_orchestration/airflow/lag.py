"""A task that checks how far consumers are behind, and gives it to Airflow's metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException
from airflow.sdk.observability import stats

from eventsql_orchestration.airflow.assets import DEFAULT_CONNECTION
from eventsql_orchestration.airflow.hook import EventSQLHook
from eventsql_orchestration.consuming.lag_values import ConsumerLag, LagCause
from eventsql_orchestration.errors import ConsumerNotFoundError
from eventsql_orchestration.orchestration.shards import where
from eventsql_orchestration.topics.side_consumers import without_backfills
from eventsql_orchestration.validation import check_seconds, check_whole, counted

if TYPE_CHECKING:
    from airflow.sdk import Context

EVENTS: Final = "eventsql.lag.events"
SECONDS: Final = "eventsql.lag.seconds"
"""Gauges with the tags `topic` and `consumer`. A backend without tags tells consumers apart by further gauges, such as
`eventsql.lag.events.<topic>.<consumer>`.
"""


class EventSQLLagOperator(BaseOperator):
    """Checks the lag of a consumer, of all consumers of a `topic`, or of all consumers.

    The task fails if a consumer has more than `max_events` waiting events, or if the oldest has waited for more than
    `max_seconds`; its error names the cause of each. A partition that somebody has paused while events wait for it, or
    whose shard is down, fails too: its consumer does not go on by itself. Give the task `retries` with a `retry_delay`
    to tolerate a lag for that time. Each try gives the gauges `eventsql.lag.events` and `eventsql.lag.seconds` to
    Airflow's metrics. The result is the lag of each consumer.
    """

    template_fields: Sequence[str] = ("topic", "consumer")
    ui_color = "#fdf3dc"

    def __init__(
        self,
        *,
        topic: str | None = None,
        consumer: str | None = None,
        max_events: int = 100_000,
        max_seconds: float = 300.0,
        eventsql_conn_id: str = DEFAULT_CONNECTION,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.topic = topic
        self.consumer = consumer
        self.max_events = check_whole("max_events", max_events, least=0)
        self.max_seconds = check_seconds("max_seconds", max_seconds, zero=True)
        self.eventsql_conn_id = eventsql_conn_id

    def execute(self, context: Context) -> list[dict[str, Any]]:  # noqa: ARG002 - the signature is Airflow's
        with EventSQLHook(self.eventsql_conn_id) as hook:
            lags = without_backfills(hook.platform.lag(self.topic))
        found: defaultdict[tuple[str, str], list[ConsumerLag]] = defaultdict(list)
        for lag in lags:
            if self.consumer in (None, lag.consumer):
                found[lag.topic, lag.consumer].append(lag)
        if self.consumer is not None and not found:
            of = "any topic" if self.topic is None else f"topic {self.topic!r}"
            raise ConsumerNotFoundError(
                f"there is no consumer {self.consumer!r} of {of}: `eventsql consumer list` shows the consumers"
            )
        results, wrong = [], []
        for (topic, consumer), partitions in sorted(found.items()):
            events = sum(lag.events for lag in partitions)
            seconds = max(lag.seconds for lag in partitions)
            tags = {"topic": topic, "consumer": consumer}
            for gauge, value in ((EVENTS, events), (SECONDS, seconds)):
                stats.gauge(gauge, value, tags=tags)
                stats.gauge(stats.normalize_name_for_stats(f"{gauge}.{topic}.{consumer}", log_warning=False), value)
            causes = [_described(lag) for lag in partitions if lag.cause is not LagCause.NONE]
            results.append({**tags, "events": events, "seconds": round(seconds, 3), "causes": causes})
            if events > self.max_events or seconds > self.max_seconds or any(map(_stands, partitions)):
                behind = f"{counted(events, 'event')}, {seconds:.0f} s"
                wrong.append(f"{topic}/{consumer} has {behind} ({'; '.join(causes)})")
        if wrong:
            raise AirflowException(f"too far behind: {', '.join(wrong)}")
        return results


def _stands(lag: ConsumerLag) -> bool:
    """Whether the partition stands still until a person acts."""
    if lag.cause is LagCause.UNREACHABLE:
        return True
    return bool(lag.events) and lag.cause in (LagCause.PAUSED, LagCause.BLOCKED)


def _described(lag: ConsumerLag) -> str:
    said = f"{lag.cause}, {lag.detail}" if lag.detail else str(lag.cause)
    place = where(lag.shard, lag.partition)
    return f"{place}: {said}" if place else said
