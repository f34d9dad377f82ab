"""`eventsql server`: show, start, name and stop the embedded server of a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from eventsql_orchestration.cli.context import CliContext, embedded_server, how_begun
from eventsql_orchestration.cli.output import say, write, write_json
from eventsql_orchestration.cli.parameters import AsJson, command
from eventsql_orchestration.cli.tables import show_fields

if TYPE_CHECKING:
    from eventsql_orchestration.database.embedded import EmbeddedPostgres, EmbeddedServer


@click.group()
def server() -> None:
    """Show, start and stop the embedded server of this directory.

    It is the server of --home, even if a database is named elsewhere. It runs on after the command that started it,
    until it is stopped. Its data, port and password stay.
    """


@command(server)
def status(context: CliContext, as_json: AsJson) -> None:
    """Show whether the server runs, its directory, process and port, and PostgreSQL's version. Starts nothing."""
    embedded = embedded_server(context.settings)
    running = embedded.status()
    shown: dict[str, object] = {"directory": str(embedded.directory), "running": running is not None}
    if running is not None:
        shown |= {"pid": running.pid, "port": running.port, "version": running.version()}
    if as_json:
        write_json(shown)
    else:
        # These numbers are names: show them without separators.
        show_fields({name: value if isinstance(value, bool | None) else str(value) for name, value in shown.items()})
        if running is None:
            say("`eventsql server start` starts it")


@command(server)
def start(context: CliContext) -> None:
    """Start the server if it does not run. A command that needs the server starts it, too."""
    embedded = embedded_server(context.settings)
    if embedded.status() is None:
        _start(embedded)
    else:
        say(f"the embedded server of {embedded.directory} runs already")


@command(server)
def url(context: CliContext) -> None:
    """Start the server if it does not run, and print its URL, password included.

    For a program that takes the URL from its environment: EVENTSQL_DSN=$(eventsql server url).
    """
    embedded = embedded_server(context.settings)
    running = embedded.status() or _start(embedded)
    write(f"{running.dsn}\n")


@command(server)
def stop(context: CliContext) -> None:
    """Stop the server. Sessions end, and uncommitted work is rolled back.

    The next command that needs the server starts it again.
    """
    embedded = embedded_server(context.settings)
    done = "has stopped; its data stays" if embedded.stop() else "does not run"
    say(f"the embedded server of {embedded.directory} {done}")


def _start(embedded: EmbeddedPostgres) -> EmbeddedServer:
    begun, running = how_begun(embedded), embedded.start()
    say(f"{begun} the embedded server of {embedded.directory} (127.0.0.1:{running.port})")
    return running
