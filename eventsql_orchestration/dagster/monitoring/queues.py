"""The queue sensor: observes the depth and age of queues, and evaluates their checks, without any run."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import dagster as dg

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.monitoring.checks import (
    LAG_CHECK,
    Look,
    ReportedCheck,
    Verdict,
    lag_allowed,
    lag_bounds,
    missing,
)
from eventsql_orchestration.dagster.monitoring.dead_letter_check import DELIVERED_CHECK
from eventsql_orchestration.dagster.monitoring.reports import Reports, cursor_of, monitoring_sensor
from eventsql_orchestration.dagster.queues.assets import QUEUE
from eventsql_orchestration.dagster.register import queue_missing
from eventsql_orchestration.errors import DatabaseBusyError, DatabaseUnavailableError, ValidationError
from eventsql_orchestration.orchestration.limits import check_not_negative
from eventsql_orchestration.orchestration.shards import shards_of
from eventsql_orchestration.queue.lag import COUNTED, QueueLag, queue_lags
from eventsql_orchestration.validation import advised, check_several, counted

AGE: Final = "Age seconds"
DEPTH: Final = "Depth"
"""Dagster's UI sorts the plots of an asset by name, capital letters first, so these two come first."""

UNREACHABLE: Final = "unreachable"


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """The limits of a queue's checks.

    The check `lag` is red if more than `max_messages` wait, or a message waits for more than `max_seconds`, and this
    lasts for longer than `grace` seconds. The check `delivered` is red if there are more than `max_dead_letters` dead
    letters.

    None sets no limit. Raises `ValidationError` for a negative number, and for numbers of messages of 10,000 or more:
    the sensor counts at most 10,000 messages in each state, so such a check would never turn red.
    """

    max_messages: int | None = None
    max_seconds: float | None = 300.0
    grace: float = 60.0
    max_dead_letters: int | None = 0

    def __post_init__(self) -> None:
        check_not_negative(self, optional=("max_messages", "max_seconds", "max_dead_letters"))
        for name, most in (("max_messages", self.max_messages), ("max_dead_letters", self.max_dead_letters)):
            if most is not None and most >= COUNTED:
                raise ValidationError(f"{name} must be below {COUNTED:,}, not {most:,}: no more messages are counted")


DEFAULT_LIMITS: Final = QueueLimits()


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue over all shards; `lags` has an entry for each shard that answers and has the queue."""

    name: str
    lags: Sequence[QueueLag]
    unreachable: Sequence[str]

    @property
    def depth(self) -> int:
        return sum(lag.depth for lag in self.lags)

    @property
    def seconds(self) -> float:
        return max((lag.seconds for lag in self.lags), default=0.0)

    @property
    def dead(self) -> int:
        return sum(lag.dead for lag in self.lags)

    @property
    def unknown(self) -> str | None:
        """Why not all of the numbers are known."""
        if self.unreachable:
            return f"no answer from {', '.join(self.unreachable)}"
        return None if self.lags else queue_missing(self.name)

    def metadata(self) -> dict[str, Any]:
        return {
            DEPTH: self.depth,
            AGE: round(self.seconds, 3),
            "Visible": sum(lag.visible for lag in self.lags),
            "In flight": sum(lag.in_flight for lag in self.lags),
            "Delayed": sum(lag.delayed for lag in self.lags),
            "Blocked": sum(lag.blocked for lag in self.lags),
            "Dead letters": self.dead,
            **({UNREACHABLE: ", ".join(self.unreachable)} if self.unreachable else {}),
        }


@dataclass(frozen=True, eq=False)
class QueueCheck(ReportedCheck):
    """A check of a queue's asset."""

    queue: str

    def read(self, platform: EventSQL) -> QueueState:
        return read_queues(platform, [self.queue])[self.queue]


def build_queue_checks(
    asset: dg.AssetSpec,
    limits: QueueLimits = DEFAULT_LIMITS,
    *,
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR,
) -> list[QueueCheck]:
    """The checks of a queue.

    `lag` is red while too many messages wait or a message waits for too long, and `delivered` while there are too many
    dead letters. `asset` comes from `queue_asset`. A check without a limit is left out. Both are also red while a shard
    does not answer, because the numbers there are unknown. In each state, up to 10,000 messages are counted. Raises
    `ValidationError` for another asset.
    """
    queue = _queue_of(asset)
    checks = []
    if limits.max_messages is not None or limits.max_seconds is not None:
        bounds = lag_bounds(limits.max_messages, "message", limits.max_seconds)
        description = lag_allowed(f"Queue {queue}", bounds, limits.grace)
        key = dg.AssetCheckKey(asset.key, LAG_CHECK)
        checks.append(QueueCheck(key, severity, description, partial(_judge_lag, limits), queue))
    if limits.max_dead_letters is not None:
        key = dg.AssetCheckKey(asset.key, DELIVERED_CHECK)
        most = limits.max_dead_letters
        allowed = f"at most {counted(most, 'dead letter')}" if most else "no dead letter"
        judge = partial(_judge_dead_letters, most)
        checks.append(QueueCheck(key, severity, f"Queue {queue} has {allowed}.", judge, queue))
    return checks


def _unknown(look: Look[QueueState]) -> Verdict | None:
    """The result for a queue that is not registered, or whose numbers are not all known."""
    state = look.state
    if (fault := state.unknown) is None:
        return None
    if state.unreachable:
        return Verdict(False, fault, state.metadata(), fault)
    return missing(fault, state.metadata(), look)


def _judge_lag(limits: QueueLimits, look: Look[QueueState]) -> Verdict:
    state = look.state
    if (unknown := _unknown(look)) is not None:
        return unknown
    said = f"{counted(state.depth, 'message')} to receive, the longest wait is {state.seconds:.1f} s"
    exceeded = []
    if limits.max_messages is not None and state.depth > limits.max_messages:
        exceeded.append(counted(limits.max_messages, "message"))
    if limits.max_seconds is not None and state.seconds > limits.max_seconds:
        exceeded.append(f"{limits.max_seconds:g} s")
    if not exceeded:
        return Verdict(True, f"{said}: within the limits", state.metadata(), "within")

    fault = f"{said}: beyond {' and '.join(exceeded)}"
    return Verdict.beyond(fault, state.metadata(), look, limits.grace, face="beyond")


def _judge_dead_letters(most: int, look: Look[QueueState]) -> Verdict:
    state = look.state
    if (unknown := _unknown(look)) is not None:
        return unknown
    if state.dead <= most:
        return Verdict(True, counted(state.dead, "dead letter"), state.metadata(), "delivered")
    letters = next(str(lag.dead_letters) for lag in state.lags if lag.dead)
    return Verdict(
        False,
        f"{counted(state.dead, 'dead letter')}: `{advised('queue peek', letters)}` shows the errors, "
        f"`{advised('queue redrive --execute', state.name)}` moves the messages back",
        state.metadata(),
        # More dead letters are reported at once, up to the number that is counted.
        f"{state.dead} dead",
    )


def build_queue_sensor(
    assets: Sequence[dg.AssetSpec],
    *,
    checks: Sequence[QueueCheck] = (),
    name: str = "queues",
    interval_seconds: int = 15,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """A sensor that observes the depth and age of queues about every `interval_seconds`, and evaluates `checks`.

    `assets` come from `queue_asset`. Each observation has the numbers `Depth`, `Age seconds` (the longest wait of a
    visible message), `Visible`, `In flight`, `Delayed`, `Blocked` and `Dead letters`, which Dagster plots. A queue that
    stays empty is observed every 5 minutes. A check is evaluated at every tick, and reported in the way of
    `build_lag_sensor`. No run is started. Raises `ValidationError` for other assets, and for checks of other queues.
    """
    check_several("checks", checks, Collection)
    queues = {spec.key: _queue_of(spec) for spec in assets}
    strangers = sorted(check.key.to_user_string() for check in checks if check.key.asset_key not in queues)
    if strangers:
        raise ValidationError(f"these checks belong to queues that the sensor does not watch: {strangers}")

    def observe(platform: EventSQL, context: dg.SensorEvaluationContext) -> dg.SensorResult:
        return observe_queues(platform, queues, checks=checks, cursor=cursor_of(context, checks), now=time.time())

    return monitoring_sensor(
        observe, name=name, interval_seconds=interval_seconds, default_status=default_status,
        description="Observes how many messages of queues wait, and evaluates the checks of queues.",
    )  # fmt: skip


def _queue_of(spec: dg.AssetSpec) -> str:
    name = spec.metadata.get(QUEUE)
    if not isinstance(name, str):
        raise ValidationError(f"asset {spec.key.to_user_string()} is not a queue: give assets of queue_asset")
    return name


def read_queues(platform: EventSQL, names: Sequence[str]) -> dict[str, QueueState]:
    """The states of queues over all shards.

    A shard that is down, or takes too long, is left out. Raises `DatabaseUnavailableError` and `DatabaseBusyError` of
    the only database, and `PermissionDeniedError` if this role may not read queues.
    """
    found: dict[str, list[QueueLag]] = {name: [] for name in names}
    down: list[str] = []
    for shard in shards_of(platform):
        try:
            lags = queue_lags(shard.database, required=True)
        except (DatabaseUnavailableError, DatabaseBusyError):
            if len(platform.shards) == 1:
                raise
            down.append(shard.label)
            continue
        for lag in lags:
            if lag.queue in found:
                found[lag.queue].append(lag)
    return {name: QueueState(name, lags, down) for name, lags in found.items()}


def observe_queues(
    platform: EventSQL,
    queues: Mapping[dg.AssetKey, str],
    *,
    checks: Sequence[QueueCheck],
    cursor: str | None,
    now: float,
) -> dg.SensorResult:
    """One tick: the observations and results that are due. `now` is in seconds since the epoch."""
    states = read_queues(platform, list(queues.values()))
    reports = Reports(cursor, now)
    said: list[str] = []
    for key, name in queues.items():
        state = states[name]
        if not state.lags:
            said.append(str(state.unknown))
            continue
        idle = not state.depth and not state.unreachable
        if not idle:
            said.append(f"{name} has {counted(state.depth, 'message')}, the longest wait is {state.seconds:.0f} s")
        reports.observe(key, state.metadata(), idle=idle)
    for check in checks:
        reports.evaluate(check, Look(platform, states[check.queue], now))
    return reports.result("; ".join(said) or "no messages wait")
