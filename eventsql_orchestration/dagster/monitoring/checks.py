"""Asset checks of consumers, and the check `lag`: red while a consumer is too far behind.

The lag sensor evaluates the checks and reports the results without a run. A person can execute each of them too.
"""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar

import dagster as dg

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.consumers.asset_lag import AssetLag, read_lags
from eventsql_orchestration.dagster.consumers.definition import ConsumerDefinition
from eventsql_orchestration.dagster.consumers.options import LagLimits
from eventsql_orchestration.dagster.register import consumer_missing
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.validation import counted

LAG_CHECK: Final = "lag"

BEYOND_SINCE: Final = "beyond since"
MISSING_SINCE: Final = "missing since"

IDLE_INTERVAL: Final = 300.0
"""Seconds between observations of an asset without lag, and between reports of a red check that has not changed: plots
go on, and event storage stays small."""

GREEN_INTERVAL: Final = 3_600.0
"""Seconds between reports of a green check that has not changed."""

RENEWAL_INTERVAL: Final = 60.0
"""Seconds between reports of a green check after its asset was materialized, because Dagster's UI then hides older
results. A red check is reported again at once."""

REGISTRATION_GRACE: Final = 60.0
"""Seconds for the job `register`: on a new platform, sensors tick before it ends."""

Memory: TypeAlias = Mapping[str, Any]
"""State of a check that is kept from one evaluation to the next, as JSON."""

Reported: TypeAlias = Mapping[str, Any]
"""The `face` of a check's last verdict, the time of its report, and the check's memory, as JSON."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Look(Generic[T]):
    """The input of a check: the state of an asset at `now` (seconds since the epoch), and the check's memory."""

    platform: EventSQL
    state: T
    now: float
    memory: Memory = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check. `memory` is for the next evaluation.

    `face` is a short form of the result: if it changes, the sensor reports the result at once.
    """

    passed: bool
    description: str
    metadata: Mapping[str, Any]
    face: str
    memory: Memory = field(default_factory=dict)

    @classmethod
    def beyond(
        cls, fault: str, metadata: Mapping[str, Any], look: Look[Any], grace: float, *, face: str, why: str = "",
        noted: str = BEYOND_SINCE,
    ) -> Self:  # fmt: skip
        """The result for a fault, which turns red after `grace` seconds without a break. `noted` names its start."""
        since = float(look.memory.get(noted, look.now))
        metadata = {**metadata, noted: dg.MetadataValue.timestamp(since)}
        memory = {noted: since}
        left = grace - (look.now - since)
        if left > 0:
            fault, face = f"{fault}; red if this lasts {left:.0f} s more", noted
        return cls(left > 0, f"{fault}. {why}" if why else fault, metadata, face, memory)


@dataclass(frozen=True, eq=False)
class ReportedCheck(ABC):
    """A check whose results a sensor reports without a run. `judge` is its rule."""

    key: dg.AssetCheckKey
    severity: dg.AssetCheckSeverity
    description: str
    judge: Callable[[Look[Any]], Verdict]

    @abstractmethod
    def read(self, platform: EventSQL) -> Any:
        """The present state of the asset, for `judge`."""

    @cached_property
    def definition(self) -> dg.AssetChecksDefinition:
        """The check for Dagster. A person can execute it."""

        @dg.asset_check(asset=self.key.asset_key, name=self.key.name, description=self.description)
        def check(context: dg.AssetCheckExecutionContext, eventsql: EventSQLResource) -> dg.AssetCheckResult:
            platform = eventsql.platform
            memory = remembered(context.instance, self.key)
            verdict = self.judge(Look(platform, self.read(platform), time.time(), memory))
            return dg.AssetCheckResult(
                passed=verdict.passed,
                severity=self.severity,
                description=verdict.description,
                metadata=verdict.metadata,
            )

        return check

    def evaluation(self, verdict: Verdict) -> dg.AssetCheckEvaluation:
        """A result as an event that is reported without a run."""
        return dg.AssetCheckEvaluation(
            asset_key=self.key.asset_key,
            check_name=self.key.name,
            passed=verdict.passed,
            severity=self.severity,
            description=verdict.description,
            metadata=dict(verdict.metadata),
        )

    def due(
        self, verdict: Verdict, reported: Reported, *, now: float, materialized: float
    ) -> tuple[dg.AssetCheckEvaluation | None, Reported]:
        """The result as an event if it has changed or is due again, and the state for the next tick.

        `materialized` is the time of the asset's last materialization; Dagster's UI hides older results.
        """
        at = reported.get("at", 0.0)
        if materialized >= at:
            pause = RENEWAL_INTERVAL if verdict.passed else 0.0
        else:
            pause = GREEN_INTERVAL if verdict.passed else IDLE_INTERVAL
        is_due = reported.get("face") != verdict.face or now - at >= pause
        left = {"face": verdict.face, "at": now if is_due else at, "memory": dict(verdict.memory)}
        return self.evaluation(verdict) if is_due else None, left


@dataclass(frozen=True, eq=False)
class ConsumerCheck(ReportedCheck):
    """A check of a consumer's asset."""

    consumer: ConsumerDefinition

    def read(self, platform: EventSQL) -> AssetLag:
        return read_lags(platform, [self.consumer]).get(self.consumer.key, AssetLag(()))


def build_lag_check(
    consumer: ConsumerDefinition,
    *,
    max_events: int | None = None,
    max_seconds: float | None = None,
    grace: float = 0.0,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.WARN,
) -> ConsumerCheck:
    """A check `lag` of a consumer's asset: red while its lag is above `max_events` or `max_seconds`.

    With `grace` (seconds), it turns red only after the lag was above the limit for that long without a break. The
    result has the cause and the numbers. The check is also red while the lag is unknown: while a shard is down, or the
    server takes too long to count the waiting events. Raises `ValidationError` if no limit is given, or a negative one.
    """
    limits = LagLimits(max_events=max_events, max_seconds=max_seconds, grace=grace)
    rule = _LagRule(consumer, limits)
    description = lag_allowed(f"Consumer {consumer.consumer.name}", rule.bounds, grace)
    return ConsumerCheck(dg.AssetCheckKey(consumer.key, LAG_CHECK), severity, description, rule, consumer)


def verbatim(text: str) -> str:
    """A text of a person or a program for the description of a result.

    Dagster's UI reads descriptions as Markdown. In it, `<class 'int'>` would be gone, and an event could show a link.
    """
    line = " ".join(text.split())
    if not line:
        return ""
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    # Markdown takes a space away on both sides.
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"


def lag_bounds(number: int | None, noun: str, seconds: float | None) -> str:
    """The limits of a lag in words. None is no limit."""
    return " and ".join(
        [*([] if number is None else [counted(number, noun)]), *([] if seconds is None else [f"{seconds:g} s"])]
    )


def lag_allowed(subject: str, bounds: str, grace: float) -> str:
    """The description of a check of a lag."""
    return f"{subject} is behind by at most {bounds}" + (f", or by more for at most {grace:g} s." if grace else ".")


def remembered(instance: dg.DagsterInstance, key: dg.AssetCheckKey) -> Memory:
    """The memory for an execution by hand, and for a sensor without a cursor, read from the newest result."""
    latest = latest_evaluation(instance, key)
    metadata = {} if latest is None else latest[0].metadata
    return {noted: metadata[noted].value for noted in (BEYOND_SINCE, MISSING_SINCE) if noted in metadata}


def latest_evaluation(
    instance: dg.DagsterInstance, key: dg.AssetCheckKey
) -> tuple[dg.AssetCheckEvaluation, float] | None:
    """The newest result of a check and its time in seconds since the epoch; None if there is none."""
    summary = instance.event_log_storage.get_asset_check_summary_records([key])[key]
    # Executions that are planned or under way have no result.
    record = summary.last_completed_check_execution_record
    if record is None or record.event is None or record.evaluation is None:
        return None
    return record.evaluation, record.event.timestamp


@dataclass(frozen=True, slots=True)
class _LagRule:
    consumer: ConsumerDefinition
    limits: LagLimits

    @property
    def bounds(self) -> str:
        return lag_bounds(self.limits.max_events, "event", self.limits.max_seconds)

    def __call__(self, look: Look[AssetLag]) -> Verdict:
        lag = look.state
        behind = f"{counted(lag.events, 'event')} and {lag.seconds:.1f} s behind"
        if not lag.registered:
            return unregistered(self.consumer, look)
        if lag.unknown is not None:
            fault = "the lag is unknown"
        elif self._is_far(lag):
            fault = f"{behind}, beyond {self.bounds}"
        elif lag.unreachable:
            fault = f"{behind}, as far as is known"
        else:
            return Verdict(True, f"{behind}: within {self.bounds}", lag.metadata(), "within")
        return Verdict.beyond(
            fault, lag.metadata(), look, self.limits.grace, face=f"beyond {lag.causes}", why=verbatim(lag.cause())
        )

    def _is_far(self, lag: AssetLag) -> bool:
        events, seconds = self.limits.max_events, self.limits.max_seconds
        return (events is not None and lag.events > events) or (seconds is not None and lag.seconds > seconds)


def missing(fault: str, metadata: Mapping[str, Any], look: Look[Any]) -> Verdict:
    """The result for a consumer or a queue that is not registered."""
    return Verdict.beyond(fault, metadata, look, REGISTRATION_GRACE, face="missing", noted=MISSING_SINCE)


def unregistered(consumer: ConsumerDefinition, look: Look[Any]) -> Verdict:
    """The result for a consumer that is not registered."""
    return missing(consumer_missing(consumer.consumer), AssetLag(()).metadata(), look)
