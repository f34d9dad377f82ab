"""Limits of consuming runs."""

# Dagster resolves components by annotations that are types, not texts.

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from eventsql_orchestration.errors import ValidationError


def check_not_negative(limits: Any, *, optional: Collection[str] = ()) -> None:
    """Raise `ValidationError` for a field that is negative or not a number. The `optional` fields may be None."""
    for each in fields(limits):
        value = getattr(limits, each.name)
        if value is None and each.name in optional:
            continue
        if value is None or not value >= 0:
            raise ValidationError(f"{each.name} must not be negative: {value}")


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """When a run is requested, how large its ranges are, and how long it goes on. Times are seconds.

    - `min_events`: number of waiting events that requests a run.
    - `max_wait`: time after which fewer waiting events request a run.
    - `max_events`: maximum number of events in a range.
    - `drain_seconds`: age at which a run stops claiming further ranges after its first one.
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
        if not 1 <= self.min_events <= self.max_events:
            raise ValidationError(
                f"1 <= min_events <= max_events is needed, not {self.min_events} and {self.max_events}"
            )
        if self.lease <= 0:
            raise ValidationError(f"lease is a positive number of seconds, not {self.lease}")
        check_not_negative(self)
