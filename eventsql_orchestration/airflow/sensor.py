"""A sensor that waits for events, for a lag, or for an offset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator, PokeReturnValue, conf

from eventsql_orchestration.airflow.assets import DEFAULT_CONNECTION
from eventsql_orchestration.airflow.conditions import Condition, Kind
from eventsql_orchestration.airflow.hook import EventSQLHook
from eventsql_orchestration.airflow.triggers import EventSQLConditionTrigger, look
from eventsql_orchestration.errors import ValidationError

if TYPE_CHECKING:
    from airflow.sdk import Context


class EventSQLSensor(BaseSensorOperator):
    """Waits until at least `events` events wait for a consumer, until its lag is at most `max_lag`, or for an `offset`.

    An `offset` is reached when the topic's log has it and, with a `consumer`, no event up to there waits for it. Over
    several shards, name the `shard` of the offset. The result is the number that the sensor waited for. A deferred
    sensor takes no worker slot; it looks every `poke_interval` seconds.
    """

    template_fields: Sequence[str] = ("topic", "consumer", "events", "max_lag", "offset", "shard")
    ui_color = "#fdf3dc"

    def __init__(
        self,
        *,
        topic: str,
        consumer: str | None = None,
        events: int | str | None = None,
        max_lag: int | str | None = None,
        offset: int | str | None = None,
        shard: str | None = None,
        eventsql_conn_id: str = DEFAULT_CONNECTION,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.topic = topic
        self.consumer = consumer
        self.events = events
        self.max_lag = max_lag
        self.offset = offset
        self.shard = shard
        self.eventsql_conn_id = eventsql_conn_id
        self.deferrable = deferrable
        if sum(given is not None for given in (events, max_lag, offset)) != 1:
            raise ValidationError("a sensor waits for one thing: give events, max_lag or offset")

    def poke(self, context: Context) -> PokeReturnValue:  # noqa: ARG002 - the signature is Airflow's
        found = look(self._condition(), EventSQLHook(self.eventsql_conn_id))
        return PokeReturnValue(found.holds, found.value)

    def execute(self, context: Context) -> Any:
        if not self.deferrable:
            return super().execute(context)
        found = self.poke(context)
        if found:
            return found.xcom_value
        self.defer(
            trigger=EventSQLConditionTrigger(
                condition=asdict(self._condition()),
                eventsql_conn_id=self.eventsql_conn_id,
                poll_interval=float(self.poke_interval),
            ),
            method_name="execute_complete",
            timeout=timedelta(seconds=self.timeout),
        )
        raise AssertionError("deferring has ended this call")

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> int:  # noqa: ARG002 - Airflow's
        """Return the number of the condition, after the trigger has found that it holds."""
        self.log.info("%s holds: %s", self._condition(), event["value"])
        return int(event["value"])

    def _condition(self) -> Condition:
        wanted: dict[Kind, int | str | None] = {
            "events": self.events, "max_lag": self.max_lag, "offset": self.offset,
        }  # fmt: skip
        kind, number = next((kind, number) for kind, number in wanted.items() if number is not None)
        try:
            return Condition(self.topic, self.consumer, kind, int(number), self.shard)
        except ValueError:
            raise ValidationError(f"{kind} is a whole number, not {number!r}") from None
