"""Limits of runs that consume topics or handle the messages of queues."""

# No `from __future__ import annotations`: Dagster's components need annotations that are types.

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.queue.message_queue import MAX_MESSAGES
from eventsql_orchestration.validation import check_batch, check_seconds, check_whole


def check_not_negative(limits: Any, *, optional: Collection[str] = ()) -> None:
    """Raise `ValidationError` for a field that is negative or not a number. The `optional` fields may be None."""
    for each in fields(limits):
        value = getattr(limits, each.name)
        if value is None and each.name in optional:
            continue
        if not (isinstance(value, int | float) and value >= 0):
            raise ValidationError(f"{each.name} must be a number of at least 0, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """When a run is requested, how large its ranges are, and how long it goes on. Times are seconds.

    - `min_events`: number of waiting events that requests a run.
    - `max_wait`: time after which fewer waiting events request a run.
    - `max_events`: maximum number of events in a range.
    - `drain_seconds`: age at which a run stops claiming further ranges after its first range.
    - `drain_events`: number of consumed events at which a run stops claiming.
    - `drain_idle`: time without an event after which a run stops claiming.
    - `lease`: time from the death of a run's process until its partition is consumed again. The
      orchestrator may see the death sooner.

    Raises `ValidationError` for limits that exclude one another.
    """

    min_events: int = 1
    max_events: int = 10_000
    max_wait: float = 5.0
    drain_seconds: float = 20.0
    drain_events: int = 1_000_000
    drain_idle: float = 1.0
    lease: float = 60.0

    def __post_init__(self) -> None:
        check_batch(self.min_events, self.max_events)
        check_seconds("lease", self.lease, zero=False)
        # A claim would refuse it in each tick.
        check_seconds("max_wait", self.max_wait, zero=True)
        check_not_negative(self)


@dataclass(frozen=True, kw_only=True)
class WorkLimits:
    """When a run that handles the messages of a queue is requested, and how long it goes on. Times are seconds.

    - `min_messages`: number of visible messages that requests a run.
    - `max_wait`: time after which fewer messages request a run. A message that waits for longer than this while runs
      are under way requests a further run, up to `max_runs`.
    - `max_runs`: maximum number of runs at once, on each shard.
    - `batch`: maximum number of messages that the function gets at once; an ordered queue gives 1,000 at most.
    - `drain_seconds`: age at which a run receives no further batch.
    - `drain_messages`: number of received messages at which a run receives no further batch.
    - `drain_idle`: time without a message after which a run ends.
    - `lease`: time without a sign of life after which a run counts as dead, and another run is requested. The messages
      of a dead run are received again after the queue's visibility timeout.

    Raises `ValidationError` for limits that exclude one another.
    """

    min_messages: int = 1
    max_wait: float = 5.0
    max_runs: int = 1
    batch: int = 100
    drain_seconds: float = 20.0
    drain_messages: int = 1_000_000
    drain_idle: float = 1.0
    lease: float = 60.0

    def __post_init__(self) -> None:
        check_not_negative(self)
        for name in ("min_messages", "max_runs", "drain_messages"):
            check_whole(name, getattr(self, name), least=1)
        check_whole("batch", self.batch, least=1, most=MAX_MESSAGES)
        # `receive` would refuse it in each run.
        check_seconds("drain_idle", self.drain_idle, zero=True)
        check_seconds("lease", self.lease, zero=False)
