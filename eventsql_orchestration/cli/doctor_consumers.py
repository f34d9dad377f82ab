"""What `eventsql doctor` finds about consumers: blocked and paused ones, dead letters, and rows of deleted ones."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from eventsql_orchestration.cli.findings import Finding, ok, problem, warning
from eventsql_orchestration.cli.output import counted
from eventsql_orchestration.consumer import ConsumerState
from eventsql_orchestration.consuming.dead_letter_values import refused
from eventsql_orchestration.model import DEAD_LETTER_SUFFIX
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.storage.metrics import COUNTED, LogMetrics
from eventsql_orchestration.topics.leftovers import Leftovers


def leftover_findings(platform: Shard) -> Iterator[Finding]:
    """Rows of topics and consumers that another program, or an earlier version, has deleted."""
    leftovers = Leftovers(platform.database)
    for left in leftovers.find():
        yield warning("leftovers", f"{left}", "eventsql topic retain")
    for name in leftovers.unregistered():
        yield warning(
            "leftovers",
            f"the buffer has events for topic {name}, which does not exist: they are moved when it is registered",
            f"eventsql topic create {shlex.quote(name)}, or delete them from event_buffer",
        )
    for topic in platform.registry.topics():
        for each in leftovers.lacking(topic.name):
            yield problem(
                "consumers",
                f"{each.consumer} of topic {topic.name} has {each.partitions} of {each.needed} partitions, and gets no "
                "events of the others",
                f"eventsql consumer create {topic.name} {shlex.quote(each.consumer)} --partitioned, which adds the "
                "others from their earliest events on",
            )


def consumer_findings(platform: Shard) -> Iterator[Finding]:
    topics = {topic.name for topic in platform.registry.topics()}
    states = platform.registry.consumers()
    findings = [finding for state in states if (finding := _consumer(state, topics)) is not None]
    yield from findings
    if not findings:
        yield ok("consumers", f"{counted(len(states), 'partition')}, none blocked or paused")


def dead_letter_findings(platform: Shard) -> Iterator[Finding]:
    """Events that consumers have given up, and that nobody has published again."""
    letters = LogMetrics(platform.database.schema)
    with platform.database.connection() as connection:
        topics = {topic.name for topic in platform.registry.topics()}
        for topic in letters.readable(connection, sorted(topics)):
            source = topic.removesuffix(DEAD_LETTER_SUFFIX)
            if source == topic or source not in topics:
                continue
            if number := letters.open_letters(connection, topic):
                most = " or more" if number >= COUNTED else ""
                yield warning(
                    "dead letters",
                    f"{counted(number, 'event')}{most} of topic {source} failed each attempt",
                    f"eventsql dlt list {source} says why; mend the handler, then: eventsql dlt redrive {source}",
                )


def _consumer(state: ConsumerState, topics: set[str]) -> Finding | None:
    partition = "" if state.partition < 0 else f" partition {state.partition}"
    name = f"{state.name} of topic {state.topic}{partition}"
    resume = f"eventsql consumer resume {state.topic} {shlex.quote(state.name)}"
    if state.failing:
        failed = f"event {state.failed_event_id} failed {state.attempts} of {state.max_attempts} times: {state.failure}"
        dead_letters = state.topic + DEAD_LETTER_SUFFIX
        if refused(state):
            return problem(
                "consumers",
                f"{name} is blocked, and the event cannot become a dead letter: {failed}",
                f"mend the handler and {resume}",
            )
        if state.spent and dead_letters not in topics:
            return problem(
                "consumers",
                f"{name} is blocked, {failed}",
                f"eventsql topic create {dead_letters}, or mend the handler and {resume}",
            )
        return warning("consumers", f"{name} is retrying, {failed}")
    if state.paused:
        return warning("consumers", f"{name} is paused", resume)
    return None
