"""`eventsql shard`: several databases as one platform."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import click

from eventsql_orchestration.cli.context import CliContext, pass_context
from eventsql_orchestration.cli.output import keep_secret, say, write_json
from eventsql_orchestration.cli.parameters import FILE, AsJson, command, executing, option
from eventsql_orchestration.cli.tables import Columns, same, show_fields, show_items, show_list
from eventsql_orchestration.cli.urls import ASK, ask_for_url, urls_of_file
from eventsql_orchestration.client.eventsql import EventSQL, ShardStatus
from eventsql_orchestration.database import Database
from eventsql_orchestration.errors import ConfigurationError
from eventsql_orchestration.shards.add_shard import Addition, ShardAddition
from eventsql_orchestration.shards.shard import Shard
from eventsql_orchestration.validation import counted


@click.group()
@pass_context
def shard(context: CliContext) -> None:
    """List shards, and add one while events flow.

    Name the existing shards before the command: eventsql --dsn URL --dsn URL shard …
    """
    context.check_whole()


def _sharded(platform: EventSQL) -> EventSQL:
    if len(platform.shards) == 1:
        raise ConfigurationError(
            "this command needs several databases, and one is named: name all shards before it, with --dsn URL for each"
        )
    return platform


ADD: Final = "`eventsql --dsn URL … shard add --dsn URL --execute`, the URLs of the other shards first"

NEW_DSN: Final = "EVENTSQL_NEW_DSN"

_MAINTENANCE: Final = frozenset({"postgres", "template1"})

_PUBLISHED: Final = {True: "yes", False: "not yet", None: "not known"}


@command(shard, "list")
def list_shards(context: CliContext, as_json: AsJson) -> None:
    """List the shards and their states.

    To list a shard that is prepared or being added, name its URL with the others.
    """
    with context.platform() as platform:
        members = _sharded(platform).status()
    columns: Columns = {**same("shard", "database"), "since generation": "generation", **same("state")}
    show_list(members, columns, as_json=as_json)
    for left in filter(None, map(what_is_left, [] if as_json else members)):
        say(left)


def what_is_left(shard: ShardStatus) -> str | None:
    """The next step for a shard that is not added yet; None if there is none."""
    if shard.state == "prepared":
        return (
            f"shard {shard.shard!r} is prepared and takes no events: give its URL to every process, then add it with "
            f"{ADD}"
        )
    if shard.state == "joining":
        return f"shard {shard.shard!r} is being added, and the keys that move to it wait: finish that with {ADD}"
    return None


@command(shard)
def status(context: CliContext, as_json: AsJson) -> None:
    """Show shards that are not added yet, consumers that are held back, and publications that are not finished.

    A consumer gets the events of an added shard after it has consumed the older events of the other shards. This
    command releases consumers, and finishes publications by Spark or an asset over several shards. Each process that
    consumes or transfers on all shards does the same by itself. A row that this command shows waits, for example for a
    shard that is down.
    """
    with context.platform() as platform:
        sharded = _sharded(platform)
        shards = {each: left for each in sharded.status() if (left := what_is_left(each)) is not None}
        held, unfinished = sharded.held_back(), sharded.unfinished()
    if as_json:
        write_json(
            {
                "not_added": [asdict(each) for each in shards],
                "held_back": [asdict(each) for each in held],
                "unfinished": [{**asdict(each), "id": str(each.id)} for each in unfinished],
            }
        )
        return
    for left in shards.values():
        say(left)
    if unfinished:
        published: Columns = {"published": lambda each: _PUBLISHED[each.decided], "not finished, because": "reason"}
        show_items(unfinished, {**same("writer", "batch"), **published})
    else:
        say("no publication is unfinished")
    if held:
        first: Columns = {
            "consumes first the earlier events on": lambda each: ", ".join(each.waits_for) or "none: this role may not "
            "release it"
        }  # fmt: skip
        show_items(held, {**same("topic", "consumer"), "held back from": "shard", **first})
    else:
        say("no consumer is held back")


_DSN: Final = (
    "The database to add. It must not have topics of its own. The list of processes shows this option. To hide the "
    "password, give `-`, which asks for the URL, or set EVENTSQL_NEW_DSN, or use --dsn-file."
)


@command(shard)
def add(
    context: CliContext,
    *,
    new: Annotated[str | None, option(_DSN, "--dsn", metavar="URL")],
    new_file: Annotated[Path | None, option("A file with the URL of the database to add.", "--dsn-file", type=FILE)],
    name: Annotated[str | None, option("Its name, for ever  [default: the next free shard-N].", metavar="NAME")],
    prepare: Annotated[bool, option("Only prepare it. Then give its URL to every process, and run --execute.")],
    execute: Annotated[bool, executing("Add it")],
    as_json: AsJson,
) -> None:
    """Add a database to the shards: a plan and, with --execute, the addition.

    Publishers and consumers go on. Keys that move to the new shard wait while it is added; all other keys go on. A
    process needs the new URL to publish keys that moved: run --prepare, give the URL to every process, then run
    --execute. If the command is interrupted, run it again to finish. With one database before the command, that
    database becomes the first shard.
    """
    if prepare and execute:
        raise click.UsageError("--prepare and --execute are two steps: give one of them")
    added = _new_url(new, new_file)
    settings = context.settings
    if not settings.dsns:
        raise ConfigurationError("name the existing shards before the command: eventsql --dsn URL shard add …")
    # `eventsql migrate` alone upgrades the existing shards.
    shards = [
        Shard(dsn, schema=settings.db_schema, migrate=dsn is added and (prepare or execute), transfer=False)
        for dsn in (*settings.dsns, added)
    ]
    try:
        addition = ShardAddition(shards[:-1], shards[-1], name=name, on_step=say)
        plan = addition.execute(only_prepare=prepare) if prepare or execute else addition.plan()
    finally:
        for each in shards:
            each.close()
    database = shards[-1].database
    if as_json:
        write_json({**asdict(plan), "database": str(database), "executed": execute})
    elif not (execute or prepare):
        _show(plan, database)
    say(_done(plan) if execute or prepare else _what_follows(plan))


def _new_url(given: str | None, file: Path | None) -> str:
    if given is not None and file is not None:
        raise click.UsageError("--dsn and --dsn-file both name the database to add: give one of them")
    url = urls_of_file(file) if file is not None else given or os.environ.get(NEW_DSN)
    if not url:
        raise click.UsageError(f"name the database to add: --dsn URL, --dsn-file FILE or {NEW_DSN}")
    if url == ASK:
        url = ask_for_url("URL of the database to add")
    keep_secret(url)
    return url


def _what_follows(plan: Addition) -> str:
    if plan.active:
        return f"shard {plan.name!r} takes events already: --execute only defines the topics and consumers it lacks"
    if plan.prepared:
        return "a plan, nothing has changed: run it again with --execute when every process has this URL"
    return "a plan, nothing has changed: run it again with --execute, or with --prepare before that"


def _done(plan: Addition) -> str:
    if not plan.active:
        return (
            f"shard {plan.name!r} takes no events yet: give its URL to every process, then run this with --execute; "
            "`eventsql shard list` shows the shard if its URL is named with the others"
        )
    return (
        f"shard {plan.name!r} takes events; a consumer gets them once it has consumed the older events of the other "
        "shards (`eventsql shard status`)"
    )


def _show(plan: Addition, database: Database) -> None:
    state = "takes events" if plan.active else "prepared" if plan.prepared else "not a shard yet"
    defined = f"{counted(plan.topics, 'topic')}, {counted(plan.consumers, 'consumer')}"
    show_fields({
        "new shard": plan.name, "database": database, "state": state, "beside": ", ".join(plan.names),
        "keys that move": f"1 in {len(plan.names) + 1}", "to be defined there": defined,
        "fenced already": ", ".join(plan.fenced) or None,
    })  # fmt: skip
    if len(plan.names) == 1 and not plan.active:
        say(
            "note: a service with one URL, also one with an outbox, gets WrongShardError for the keys that move: give "
            "it all URLs; for an outbox, platform.shard_of(key) names the shard of its transaction"
        )
    if database.url.database in _MAINTENANCE:
        say(
            f"note: {database.url.database!r} is the server's database for maintenance: create another database "
            "for the shard"
        )
