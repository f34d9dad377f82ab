"""`eventsql migrate`: the platform's tables, created or brought up to date, and the first set of shards."""

from __future__ import annotations

from typing import Annotated

import click

from eventsql_orchestration.cli.context import CliContext, open_platform
from eventsql_orchestration.cli.output import say
from eventsql_orchestration.cli.parameters import command, option
from eventsql_orchestration.database import migrations
from eventsql_orchestration.errors import DatabaseError
from eventsql_orchestration.shards.shard import Shard

_TIMES_IN = (
    "If EventSQL's Java library made the tables: the time zone of its machines, such as Europe/Warsaw. The default is "
    "UTC. Any other zone rewrites the tables, and nobody else can use them meanwhile."
)


@command()
def migrate(context: CliContext, times_in: Annotated[str | None, option(_TIMES_IN, metavar="ZONE")]) -> None:
    """Create the platform's tables, or bring them up to date.

    Safe to run at any time, and by several processes at once. Tables of a newer version stay as they are. Several
    databases without topics become the shards of one set. Databases of different sets stay unchanged.
    """
    context.check_whole()
    several = len(context.settings.dsns) > 1
    if several and times_in is not None:
        raise click.UsageError("--times-in is for one database: run it with each --dsn alone, then with all of them")
    with open_platform(context.settings, migrate=several) as platform:
        before = [shard.database.revision() for shard in platform.shards]
        if several:
            platform.open()
        for shard, revision in zip(platform.shards, before, strict=True):
            if times_in is not None and revision is not None:
                raise DatabaseError(
                    f"--times-in comes too late: the first migration of {shard.database} adopted its times; run "
                    "`eventsql migrate` without it"
                )
            _migrate(shard, revision, times_in or "UTC")


def _migrate(shard: Shard, before: str | None, times_in: str) -> None:
    database = shard.database
    database.migrate(times_in=times_in)
    after = database.revision()
    named = "" if shard.name is None else f"shard {shard.name!r}: "
    at = f"{named}schema {database.schema!r} of {database}"
    if before is not None and not migrations.known(before):
        say(f"{at} is at revision {before}, of a newer version of eventsql-orchestration: this one works with it")
    elif before == after:
        say(f"{at} was at revision {after} already")
    else:
        say(f"{at} is at revision {after} now{'' if before is None else f', it was at {before}'}")
