"""Asset checks of consumers: `lag`, red when one is too far behind, and `delivered`, red when an event failed for good.

The lag sensor evaluates them by itself and reports the results without a run; each can also be executed by hand.
"""

import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import dagster as dg

from eventsql_orchestration import EventSQL
from eventsql_orchestration.dagster.definition import ConsumerDefinition
from eventsql_orchestration.dagster.lag import AssetLag, read_lag
from eventsql_orchestration.dagster.resources import EventSQLResource
from eventsql_orchestration.dagster.topics import topic_key
from eventsql_orchestration.errors import TopicNotFoundError, ValidationError
from eventsql_orchestration.log import dead_letters
from eventsql_orchestration.log.dead_letters import DeadLetter, LetterFilter
from eventsql_orchestration.model import ConsumerState

LAG_CHECK: Final = "lag"
DELIVERED_CHECK: Final = "delivered"

BEYOND_SINCE: Final = "beyond since"
OPEN_LETTERS: Final = "open dead letters"
BLOCKED_PARTITIONS: Final = "blocked partitions"

LETTERS_SHOWN: Final = 10
"""Dead letters that a check names at most, the oldest: their values are read with them, at each tick of the sensor."""

UNDER_WAY: Final = 5
"""Executions of one check that may be under way, or have died, since its newest result."""

Memory: TypeAlias = Mapping[str, Any]
"""What a check keeps from one evaluation to the next, as JSON has it."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a check judges: a consumer as it is `now` (seconds since the epoch), and what the check kept before."""

    platform: EventSQL
    lag: AssetLag
    now: float
    memory: Memory = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check says. It is news where its `face` is another one than before; `memory` is for the next look."""

    passed: bool
    description: str
    metadata: Mapping[str, Any]
    face: str
    memory: Memory = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ConsumerCheck:
    """A check of a consumer's asset; `definition` is what Dagster loads."""

    consumer: ConsumerDefinition
    name: str
    severity: dg.AssetCheckSeverity
    definition: dg.AssetChecksDefinition
    judge: Callable[[Look], Verdict]

    @property
    def key(self) -> dg.AssetCheckKey:
        return dg.AssetCheckKey(self.consumer.key, self.name)

    def evaluation(self, verdict: Verdict) -> dg.AssetCheckEvaluation:
        """A verdict as an event that is reported without a run."""
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
    """A check `lag` of a consumer's asset: red when it is behind by more than so many events or so many seconds.

    With `grace`, only when it has been so for that many seconds without a break. The result says why, as the lag's
    cause, with the numbers. Raises `ValidationError` where no threshold is given, or one is negative.
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
    return _define(consumer, LAG_CHECK, description, severity, rule)


def build_delivered_check(
    consumer: ConsumerDefinition, *, severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR
) -> ConsumerCheck:
    """A check `delivered` of a consumer's asset: red while an event that it gave up is not settled.

    That is while a dead letter of it lies in `<topic>_dlt` and was not redriven, or while a failed event blocks one of
    its partitions. The result names the events with their errors, and the commands that show and redrive them.
    """
    description = f"Consumer {consumer.consumer.name} has no open dead letter, and no event blocks it."
    return _define(consumer, DELIVERED_CHECK, description, severity, _DeliveredRule(consumer))


def _define(
    consumer: ConsumerDefinition,
    name: str,
    description: str,
    severity: dg.AssetCheckSeverity,
    judge: Callable[[Look], Verdict],
) -> ConsumerCheck:
    key = dg.AssetCheckKey(consumer.key, name)

    @dg.asset_check(asset=consumer.key, name=name, description=description)
    def check(context: dg.AssetCheckExecutionContext, eventsql: EventSQLResource) -> dg.AssetCheckResult:
        try:
            lag = read_lag(eventsql.platform, consumer)
        except TopicNotFoundError:
            lag = AssetLag(())
        verdict = judge(Look(eventsql.platform, lag, time.time(), _remembered(context.instance, key)))
        return dg.AssetCheckResult(
            passed=verdict.passed, severity=severity, description=verdict.description, metadata=verdict.metadata
        )

    return ConsumerCheck(consumer, name, severity, check, judge)


def _remembered(instance: dg.DagsterInstance, key: dg.AssetCheckKey) -> Memory:
    """What an execution by hand knows of the looks before it: the sensor's memory is in its cursor."""
    latest = latest_evaluation(instance, key)
    since = None if latest is None else latest[0].metadata.get(BEYOND_SINCE)
    return {} if since is None else {BEYOND_SINCE: since.value}


def latest_evaluation(
    instance: dg.DagsterInstance, key: dg.AssetCheckKey
) -> tuple[dg.AssetCheckEvaluation, float] | None:
    """The newest evaluation of a check that has ended, whoever made it, and when; None where there is none."""
    # An execution that is planned or under way is the newest record, without a result.
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
            return _unregistered(self.consumer)
        if not self._beyond(lag):
            return Verdict(True, f"{_behind(lag)}: within {self.limits}", lag.metadata(), "within")
        since = float(look.memory.get(BEYOND_SINCE, look.now))
        metadata = {**lag.metadata(), BEYOND_SINCE: dg.MetadataValue.timestamp(since)}
        memory = {BEYOND_SINCE: since}
        left = self.grace - (look.now - since)
        if left > 0:
            description = f"{_behind(lag)}, beyond {self.limits}; red when it stays so for {left:.0f} s. {lag.cause()}"
            return Verdict(True, description, metadata, "beyond for a while", memory)
        description = f"{_behind(lag)}, beyond {self.limits}. {lag.cause()}"
        return Verdict(False, description, metadata, f"beyond {lag.causes}", memory)

    def _beyond(self, lag: AssetLag) -> bool:
        return (self.max_events is not None and lag.events > self.max_events) or (
            self.max_seconds is not None and lag.seconds > self.max_seconds
        )


def _behind(lag: AssetLag) -> str:
    return f"{lag.events} events and {lag.seconds:.1f} s behind"


def _unregistered(consumer: ConsumerDefinition) -> Verdict:
    return Verdict(False, f"consumer {consumer.consumer.name!r} is not registered", AssetLag(()).metadata(), "missing")


_NONE_BEFORE: Final = "no open letter up to"
_TOPIC_MADE: Final = "of the topic created at"


@dataclass(frozen=True, slots=True)
class _DeliveredRule:
    consumer: ConsumerDefinition

    def __call__(self, look: Look) -> Verdict:
        if not look.lag.partitions:
            return _unregistered(self.consumer)
        topic, name = self.consumer.topic.name, self.consumer.consumer.name
        letters, memory = _open_letters(look, topic, name)
        blocked = [
            (state, reason)
            for state in look.platform.registry.consumer(topic, name)
            if (reason := look.platform.dead_letters.blocking(state)) is not None
        ]
        metadata: dict[str, Any] = {OPEN_LETTERS: min(len(letters), LETTERS_SHOWN), BLOCKED_PARTITIONS: len(blocked)}
        if not letters and not blocked:
            return Verdict(True, "every event was delivered", metadata, "delivered", memory)
        description = "; ".join(
            [*(_blocked(state, reason) for state, reason in blocked), *([_given_up(letters)] if letters else [])]
        )
        if letters:
            metadata |= _letters_metadata(topic, name, letters)
        if blocked:
            metadata["resume"] = f"eventsql consumer resume {topic} {shlex.quote(name)}"
        face = f"{[letter.id for letter in letters]} {[(s.partition, s.failed_event_id) for s, _ in blocked]}"
        return Verdict(False, description, metadata, face, memory)


def _open_letters(look: Look, topic: str, consumer: str) -> tuple[list[DeadLetter], Memory]:
    """The oldest dead letters that are open, one more than is shown, and up to where there was none.

    A letter is redriven once and for all, so those before the first open one need not be looked at again: looking
    through 300,000 letters for one consumer's would take each tick hundreds of milliseconds.
    """
    platform = look.platform
    source = platform.dead_letters.topic_of(topic)
    if source is None:
        return [], {}
    made = str(platform.registry.topic(source).created_at)
    after = int(look.memory.get(_NONE_BEFORE, 0)) if look.memory.get(_TOPIC_MADE) == made else 0
    end = platform.reader.end(source)
    letters = platform.dead_letters.list(
        topic, LetterFilter(consumer=consumer, after=after), limit=LETTERS_SHOWN + 1, redriven=False
    )
    # What came after `end` was read is looked at next time.
    return letters, {_NONE_BEFORE: letters[0].id - 1 if letters else max(after, end), _TOPIC_MADE: made}


def _given_up(letters: list[DeadLetter]) -> str:
    first = letters[0]
    if len(letters) == 1:
        return f"1 dead letter is open: {_named(first)}"
    count = f"more than {LETTERS_SHOWN}" if len(letters) > LETTERS_SHOWN else str(len(letters))
    return f"{count} dead letters are open, the oldest: {_named(first)}"


def _named(letter: DeadLetter) -> str:
    cause = letter.metadata
    return (
        f"event {letter.origin or 'of unknown origin'} failed {cause.get(dead_letters.ATTEMPTS, 'some')} times "
        f"({cause.get(dead_letters.EXCEPTION)}: {cause.get(dead_letters.MESSAGE)})"
    )


def _blocked(state: ConsumerState, reason: str) -> str:
    where = state.topic if state.partition < 0 else f"{state.topic}[{state.partition}]"
    return (
        f"{where} is blocked by event {state.failed_event_id}, which failed {state.attempts} times "
        f"({state.failure}), and {reason}"
    )


def _letters_metadata(topic: str, consumer: str, letters: list[DeadLetter]) -> dict[str, Any]:
    shown = letters[:LETTERS_SHOWN]
    return {
        "dead letters": dg.MetadataValue.table(
            [
                dg.TableRecord(
                    {
                        "topic": str(letter.metadata.get(dead_letters.SOURCE_TOPIC, topic)),
                        "partition": str(letter.metadata.get(dead_letters.SOURCE_PARTITION, "")),
                        "offset": str(letter.metadata.get(dead_letters.SOURCE_OFFSET, "")),
                        "attempts": str(letter.metadata.get(dead_letters.ATTEMPTS, "")),
                        "error": f"{letter.metadata.get(dead_letters.EXCEPTION)}: "
                        f"{letter.metadata.get(dead_letters.MESSAGE)}",
                        "given up at": letter.buffered_at.isoformat(timespec="seconds"),
                        "show": f"eventsql dlt show {topic} {letter.id}",
                    }
                )
                for letter in shown
            ]
        ),
        "show": f"eventsql dlt show {topic} {shown[0].id}",
        "redrive": f"eventsql dlt redrive {topic} --consumer {shlex.quote(consumer)}",
        "dead letter topic": dg.MetadataValue.asset(topic_key(shown[0].topic)),
    }
