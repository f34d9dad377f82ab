"""Findings of `eventsql doctor` about consumers: blocked, paused or idle, with dead letters or leftover rows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from psycopg import sql

from eventsql_orchestration.cli.findings import Finding, ok, problem, warning
from eventsql_orchestration.consumer import ConsumerState
from eventsql_orchestration.consuming.dead_letter_values import refused, tried
from eventsql_orchestration.consuming.deliveries import unattended
from eventsql_orchestration.consuming.lag_values import ConsumerLag, LagCause
from eventsql_orchestration.database import Database
from eventsql_orchestration.errors import InvalidNameError
from eventsql_orchestration.model import DEAD_LETTER_SUFFIX, check_topic_name
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.storage.metrics import COUNTED, LogMetrics
from eventsql_orchestration.topics.catalog import refuse_capitals
from eventsql_orchestration.topics.leftovers import Leftovers
from eventsql_orchestration.topics.side_consumers import without_backfills
from eventsql_orchestration.validation import advised, age, counted

IDLE: Final = timedelta(minutes=10)
"""Time without consumption after which a consumer, a subscription or a queue may have no process."""


def leftover_findings(shard: Shard) -> Iterator[Finding]:
    """Rows of topics and consumers that another program, or an earlier version, has deleted."""
    leftovers = Leftovers(shard.database)
    for left in leftovers.find():
        yield warning("leftovers", f"{left}", "eventsql topic retain --execute")
    for table in leftovers.begun_drops():
        yield warning(
            "leftovers",
            f"a retention is about to drop segment {table}, or was interrupted",
            "eventsql topic retain --execute",
        )
    for name in leftovers.unregistered():
        yield _unregistered(shard.database, name)
    for topic in shard.registry.topics():
        for each in leftovers.lacking(topic.name):
            yield problem(
                "consumers",
                f"{each.consumer} of topic {topic.name} has {each.partitions} of {each.needed} partitions, and gets no "
                "events of the others",
                f"{advised('consumer create --partitioned', topic.name, each.consumer)}, which adds the others "
                "from their earliest events on",
            )


def _unregistered(database: Database, name: str) -> Finding:
    found = f"the buffer has events for topic {name}, which does not exist"
    try:
        check_topic_name(name)
        with database.core() as connection:
            refuse_capitals(connection, name)
    except InvalidNameError as error:
        buffer, topic = sql.Identifier(database.schema, "event_buffer").as_string(), sql.Literal(name).as_string()
        again = "correct the program that publishes them, and publish them again under the topic's name"
        remedy = f"{again}; then: DELETE FROM {buffer} WHERE eql_topic = {topic}"  # noqa: S608 - to be read
        return warning("leftovers", f"{found}: {error}", remedy)
    return warning(
        "leftovers",
        f"{found}: they are moved when it is registered",
        f"{advised('topic create', name)}, and if nobody needs them, then "
        f"{advised('topic delete --execute --force', name)}",
    )


def consumer_findings(shard: Shard) -> Iterator[Finding]:
    topics = {topic.name for topic in shard.registry.topics()}
    states = shard.registry.consumers()
    alike: dict[tuple[str, str, str | None, str | None], list[ConsumerState]] = {}
    for state in states:
        if state.failing:
            case = state.topic, state.name, _failing(state, topics).remedy, state.failure
            alike.setdefault(case, []).append(state)
    findings = [_failing(state, topics, more=len(others)) for state, *others in alike.values()]
    findings += [
        warning("consumers", f"{name} of topic {topic} is paused", advised("consumer resume", topic, name))
        for topic, name in dict.fromkeys((state.topic, state.name) for state in states if state.paused)
    ]
    yield from findings
    if not findings:
        yield ok("consumers", f"{counted(len(states), 'partition')}, none blocked or paused")


def unattended_findings(shard: Shard) -> Iterator[Finding]:
    """Consumers that `start_queue` has consumed, and that no process runs now."""
    for topic, name, partitions in unattended(shard.database):
        yield warning(
            "consumers",
            f"{name} of topic {topic} was consumed by start_queue, and no process consumes it now: "
            f"{counted(partitions, 'partition')} cannot be consumed in another way, and retention keeps the events",
            "run start_queue, which finishes them, or move the consumer by eventsql seek --execute --force",
        )


def idle_findings(shard: Shard) -> Iterator[Finding]:
    """Consumers and partitions that nobody consumes, as far as can be seen, for ten minutes while events wait."""
    waiting: dict[tuple[str, str], list[ConsumerLag]] = {}
    for lag in without_backfills(shard.lag()):
        if lag.cause is LagCause.WAITING:
            waiting.setdefault((lag.topic, lag.consumer), []).append(lag)
    if not waiting:
        return
    busy: dict[tuple[str, str], set[int]] = {}
    for each in shard.registry.consumers():
        if each.last_consumption_at is not None and each.last_consumption_at > each.read_at - IDLE:
            busy.setdefault((each.topic, each.name), set()).add(each.partition)
    for (topic, name), lags in waiting.items():
        working = busy.get((topic, name), set())
        late = [lag for lag in lags if lag.seconds > IDLE.total_seconds() and lag.partition not in working]
        if not late:
            continue
        if working:
            place, beside = _place(topic, name, late[0].partition, more=len(late) - 1), ", while other partitions go on"
            remedy = (
                "no fault if it waits for more events or for a free worker; the log of its process tells of errors; if "
                "its handler does not return, a finding about transactions names its session: start that process again"
            )
        else:
            place, beside, late = _place(topic, name), "", lags
            remedy = (
                "start the process that runs it, or Dagster's daemon with its sensor; if nobody runs it any more: "
                f"{advised('consumer delete --execute', topic, name)}"
            )
        events, seconds = sum(lag.events for lag in late), max(lag.seconds for lag in late)
        yield warning(
            "consumers",
            f"{place} has consumed nothing for ten minutes{beside}, and {counted(events, 'event')} "
            f"{'waits' if events == 1 else 'wait'}, the oldest for {age(round(seconds))}",
            remedy,
        )


def retention_findings(shard: Shard) -> Iterator[Finding]:
    """Topics that keep events beyond their retention, because a consumer has not passed them."""
    for topic, consumer in shard.retention.held().items():
        yield warning(
            "retention",
            f"topic {topic} keeps events beyond its retention, because {consumer} has not passed them",
            f"{advised('lag --backfills', topic)} says why; delete a consumer that nobody runs any more: eventsql "
            "consumer delete --help",
        )


def dead_letter_findings(shard: Shard) -> Iterator[Finding]:
    """Events that consumers have given up, and that nobody has published again or dismissed."""
    letters = LogMetrics(shard.database.schema)
    with shard.database.connection() as connection:
        topics = {topic.name for topic in shard.registry.topics()}
        for topic in letters.readable(connection, sorted(topics)):
            source = topic.removesuffix(DEAD_LETTER_SUFFIX)
            if source == topic or source not in topics:
                continue
            if number := letters.open_letters(connection, topic):
                most = " or more" if number >= COUNTED else ""
                yield warning(
                    "dead letters",
                    f"{counted(number, 'event')}{most} of topic {source} failed each attempt",
                    f"eventsql dlt list {source} says why; correct the handler, then: eventsql dlt redrive --execute "
                    f"{source}; if they need no handling: eventsql dlt dismiss --execute {source}",
                )


def _place(topic: str, consumer: str, partition: int = -1, *, more: int = 0) -> str:
    """A consumer, or one of its partitions and `more` partitions."""
    named = "" if partition < 0 else f" partition {partition}"
    return f"{consumer} of topic {topic}{named}" + (f" (and {more:,} more)" if more else "")


def _failing(state: ConsumerState, topics: set[str], *, more: int = 0) -> Finding:
    """The finding about a partition with a failing event, and `more` partitions of its consumer in the same case."""
    name = _place(state.topic, state.name, state.partition, more=more)
    resume = advised("consumer resume", state.topic, state.name)
    failed = tried(state)
    dead_letters = state.topic + DEAD_LETTER_SUFFIX
    if refused(state):
        return problem(
            "consumers",
            f"{name} is blocked, and the event cannot become a dead letter: {failed}",
            f"correct the handler and {resume}",
        )
    if state.spent and dead_letters not in topics:
        return problem(
            "consumers",
            f"{name} is blocked, {failed}",
            f"eventsql topic create {dead_letters}, or correct the handler and {resume}",
        )
    due = state.retry_at or state.read_at
    if state.read_at - due > IDLE and not state.paused and not state.leased:
        since = age(round((state.read_at - due).total_seconds()))
        return warning(
            "consumers",
            f"{name} has not tried again for {since}, {failed}",
            "correct the handler, and start the process that runs it, or Dagster's daemon with its sensor",
        )
    return warning(
        "consumers", f"{name} is retrying, {failed}", "correct the handler: it gets the event again by itself"
    )
