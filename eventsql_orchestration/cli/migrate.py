"""`eventsql migrate`: the platform's tables, created or brought up to date."""

from __future__ import annotations

import click

from eventsql_orchestration.cli.context import CliContext, open_platform, pass_context
from eventsql_orchestration.cli.output import say
from eventsql_orchestration.database import migrations
from eventsql_orchestration.errors import DatabaseError


@click.command()
@pass_context
def migrate(context: CliContext) -> None:
    """Create the platform's tables, or bring them up to date.

    Safe to run at any time, and by several processes at once.
    """
    with open_platform(context.settings, migrate=False) as platform:
        database = platform.database
        before = database.revision()
        if before is not None and not migrations.known(before):
            raise DatabaseError(
                f"schema {database.schema!r} of {database} is at revision {before}, which this version of "
                "eventsql-orchestration does not know: upgrade the package"
            )
        database.migrate()
        after = migrations.head()
        where = f"schema {database.schema!r} of {database}"
        if before == after:
            say(f"{where} was at revision {after} already")
        else:
            say(f"{where} is at revision {after} now{'' if before is None else f', it was at {before}'}")
