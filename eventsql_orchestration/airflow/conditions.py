"""Conditions that a sensor waits for: events that wait, a lag that shrinks, an offset that is reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from eventsql_orchestration import NOT_PARTITIONED, Shard
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import check_topic_name
from eventsql_orchestration.orchestration.shards import shard_named
from eventsql_orchestration.validation import check_name, check_whole

Kind = Literal["events", "max_lag", "offset"]


@dataclass(frozen=True, slots=True)
class Found:
    """Whether a condition holds, and the number that it looks at."""

    holds: bool
    value: int


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a topic and its consumer.

    - `events`: at least `number` events wait for the consumer.
    - `max_lag`: at most `number` events wait for the consumer.
    - `offset`: the topic's log has come to offset `number` and, with a consumer, no event up to there waits for it.

    Raises `ValidationError`.
    """

    topic: str
    consumer: str | None
    kind: Kind
    number: int
    shard: str | None = None

    def __post_init__(self) -> None:
        check_topic_name(self.topic)
        if self.kind not in get_args(Kind):
            raise ValidationError(f"a condition is one of {', '.join(get_args(Kind))}, not {self.kind!r}")
        check_whole(self.kind, self.number, least=0 if self.kind == "max_lag" else 1)
        if self.consumer is not None:
            check_name("consumer name", self.consumer)
        elif self.kind != "offset":
            raise ValidationError(f"{self.kind} is a number of events of a consumer: name the consumer")

    def __str__(self) -> str:
        of = self.topic if self.consumer is None else f"{self.topic}/{self.consumer}"
        return f"{self.kind} {self.number} of {of}"

    def look(self, shards: Sequence[Shard]) -> Found:
        """Look at the databases now. Raises `EventSQLError`, for example for a consumer that does not exist."""
        if self.kind == "offset":
            return self._offset(shards)
        assert self.consumer is not None, "checked above"
        waiting = 0
        for shard in shards:
            # An unknown consumer has no lag, and would seem to have consumed everything.
            shard.registry.consumer(self.topic, self.consumer)
            waiting += sum(lag.events for lag in shard.lag(self.topic, self.consumer))
        return Found(waiting >= self.number if self.kind == "events" else waiting <= self.number, waiting)

    def _offset(self, shards: Sequence[Shard]) -> Found:
        shard = shards[0] if len(shards) == 1 else shard_named(shards, self.shard)
        # Retention may have emptied the log.
        end = max(shard.reader.end(self.topic, None), shard.reader.floor(self.topic) - 1)
        if end < self.number or self.consumer is None:
            return Found(end >= self.number, end)
        left = 0
        for state in shard.registry.consumer(self.topic, self.consumer):
            if state.last_event_id < self.number:
                partition = None if state.partition == NOT_PARTITIONED else state.partition
                left += shard.reader.count(self.topic, after=state.last_event_id, upto=self.number, partition=partition)
        return Found(not left, end)
