"""Asset checks of consumers, and the check `lag`: red while a consumer is too far behind.

The lag sensor evaluates the checks and reports the results without a run. A person can execute each of them too.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import dagster as dg

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.consumers.definition import ConsumerDefinition
from eventsql_orchestration.dagster.monitoring.lag import AssetLag, read_lags
from eventsql_orchestration.dagster.register import consumer_missing
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.errors import ValidationError

LAG_CHECK: Final = "lag"

BEYOND_SINCE: Final = "beyond since"

UNDER_WAY: Final = 5
"""The most executions of one check, under way or dead, that are expected since its newest result."""

Memory: TypeAlias = Mapping[str, Any]
"""State of a check that is kept from one evaluation to the next, as JSON."""


@dataclass(frozen=True, slots=True)
class Look:
    """The input of a check: a consumer's state at `now` (seconds since the epoch), and the check's memory."""

    platform: EventSQL
    lag: AssetLag
    now: float
    memory: Memory = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check. It is reported at once if its `face` has changed. `memory` is for the next evaluation."""

    passed: bool
    description: str
    metadata: Mapping[str, Any]
    face: str
    memory: Memory = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ConsumerCheck:
    """A check of a consumer's asset; `definition` is for Dagster."""

    consumer: ConsumerDefinition
    name: str
    severity: dg.AssetCheckSeverity
    definition: dg.AssetChecksDefinition
    judge: Callable[[Look], Verdict]

    @property
    def key(self) -> dg.AssetCheckKey:
        return dg.AssetCheckKey(self.consumer.key, self.name)

    def evaluation(self, verdict: Verdict) -> dg.AssetCheckEvaluation:
        """A result as an event that is reported without a run."""
        return dg.AssetCheckEvaluation(
            asset_key=self.consumer.key,
            check_name=self.name,
            passed=verdict.passed,
            severity=self.severity,
            description=verdict.description,
            metadata=dict(verdict.metadata),
        )


def build_lag_check(
    consumer: ConsumerDefinition,
    *,
    max_events: int | None = None,
    max_seconds: float | None = None,
    grace: float = 0.0,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.WARN,
) -> ConsumerCheck:
    """A check `lag` of a consumer's asset: red while its lag is above `max_events` or `max_seconds`.

    With `grace` (seconds), it turns red only after the lag was above for that long without a break. The result has the
    cause and the numbers. The check is also red while a shard is down, because the lag there is unknown. Raises
    `ValidationError` if no threshold is given, or a negative one.
    """
    if max_events is None and max_seconds is None:
        raise ValidationError("a lag check needs max_events, max_seconds, or both")
    if (max_events is not None and max_events < 0) or (max_seconds is not None and max_seconds < 0):
        raise ValidationError("max_events and max_seconds must not be negative")
    if grace < 0:
        raise ValidationError(f"grace is a number of seconds, not {grace}")
    rule = _LagRule(consumer, max_events, max_seconds, grace)
    description = f"Consumer {consumer.consumer.name} is behind by {rule.limits} at most" + (
        f", or not for longer than {grace:g} s." if grace else "."
    )
    return define_check(consumer, LAG_CHECK, description, severity, rule)


def define_check(
    consumer: ConsumerDefinition,
    name: str,
    description: str,
    severity: dg.AssetCheckSeverity,
    judge: Callable[[Look], Verdict],
) -> ConsumerCheck:
    """A check of a consumer's asset by a rule."""
    key = dg.AssetCheckKey(consumer.key, name)

    @dg.asset_check(asset=consumer.key, name=name, description=description)
    def check(context: dg.AssetCheckExecutionContext, eventsql: EventSQLResource) -> dg.AssetCheckResult:
        lag = read_lags(eventsql.platform, [consumer]).get(consumer.key, AssetLag(()))
        verdict = judge(Look(eventsql.platform, lag, time.time(), _remembered(context.instance, key)))
        return dg.AssetCheckResult(
            passed=verdict.passed, severity=severity, description=verdict.description, metadata=verdict.metadata
        )

    return ConsumerCheck(consumer, name, severity, check, judge)


def _remembered(instance: dg.DagsterInstance, key: dg.AssetCheckKey) -> Memory:
    """The memory for an execution by hand, read from the newest result: the sensor's memory is in its cursor."""
    latest = latest_evaluation(instance, key)
    since = None if latest is None else latest[0].metadata.get(BEYOND_SINCE)
    return {} if since is None else {BEYOND_SINCE: since.value}


def latest_evaluation(
    instance: dg.DagsterInstance, key: dg.AssetCheckKey
) -> tuple[dg.AssetCheckEvaluation, float] | None:
    """The newest result of a check and its time in seconds since the epoch; None if there is none."""
    # The newest records can be executions that are planned or under way, without a result.
    for record in instance.event_log_storage.get_asset_check_execution_history(key, limit=UNDER_WAY + 1):
        if isinstance(record.evaluation, dg.AssetCheckEvaluation):
            return record.evaluation, record.create_timestamp if record.event is None else record.event.timestamp
    return None


@dataclass(frozen=True, slots=True)
class _LagRule:
    consumer: ConsumerDefinition
    max_events: int | None
    max_seconds: float | None
    grace: float

    @property
    def limits(self) -> str:
        events = None if self.max_events is None else f"{self.max_events} events"
        seconds = None if self.max_seconds is None else f"{self.max_seconds:g} s"
        return " and ".join(limit for limit in (events, seconds) if limit)

    def __call__(self, look: Look) -> Verdict:
        lag = look.lag
        if not lag.partitions:
            return unregistered(self.consumer)
        if not self._beyond(lag):
            return Verdict(True, f"{_behind(lag)}: within {self.limits}", lag.metadata(), "within")
        fault = f"beyond {self.limits}" if self._far(lag) else "as far as is known"
        since = float(look.memory.get(BEYOND_SINCE, look.now))
        metadata = {**lag.metadata(), BEYOND_SINCE: dg.MetadataValue.timestamp(since)}
        memory = {BEYOND_SINCE: since}
        left = self.grace - (look.now - since)
        if left > 0:
            description = f"{_behind(lag)}, {fault}; red when it stays so for {left:.0f} s. {lag.cause()}"
            return Verdict(True, description, metadata, "beyond for a while", memory)
        description = f"{_behind(lag)}, {fault}. {lag.cause()}"
        return Verdict(False, description, metadata, f"beyond {lag.causes}", memory)

    def _beyond(self, lag: AssetLag) -> bool:
        return self._far(lag) or bool(lag.unreachable)

    def _far(self, lag: AssetLag) -> bool:
        return (self.max_events is not None and lag.events > self.max_events) or (
            self.max_seconds is not None and lag.seconds > self.max_seconds
        )


def _behind(lag: AssetLag) -> str:
    return f"{lag.events} events and {lag.seconds:.1f} s behind"


def unregistered(consumer: ConsumerDefinition) -> Verdict:
    """The result for a consumer that is not registered."""
    return Verdict(False, consumer_missing(consumer.consumer), AssetLag(()).metadata(), "missing")
