"""`eventsql server`: show, name and stop the embedded server of a directory."""

from __future__ import annotations

import click

from eventsql_orchestration.cli.context import CliContext, embedded_server, pass_context
from eventsql_orchestration.cli.output import say, show_fields, write, write_json
from eventsql_orchestration.cli.parameters import json_option


@click.group()
def server() -> None:
    """Look at the embedded server of this directory, print its URL, stop it.

    It is the server of --home, also if a database is named elsewhere. It runs on after the command that started it,
    until it is stopped. Its data, port and password stay.
    """


@server.command()
@json_option
@pass_context
def status(context: CliContext, *, as_json: bool) -> None:
    """Show whether it runs, its directory, process and port, and PostgreSQL's version. Starts nothing."""
    embedded = embedded_server(context.settings)
    running = embedded.status()
    shown: dict[str, object] = {"directory": str(embedded.directory), "running": running is not None}
    if running is not None:
        shown |= {"pid": running.pid, "port": running.port, "version": running.version()}
    if as_json:
        write_json(shown)
    else:
        # These numbers are names: show them without separators.
        show_fields(
            {name: value if value is None or isinstance(value, bool) else str(value) for name, value in shown.items()}
        )


@server.command()
@pass_context
def url(context: CliContext) -> None:
    """Print its URL, password included. Start it if it does not run.

    For a program that takes the URL from its environment: EVENTSQL_DSN=$(eventsql server url).
    """
    embedded = embedded_server(context.settings)
    running = embedded.status()
    if running is None:
        running = embedded.start()
        say(f"started the embedded server of {embedded.directory} (127.0.0.1:{running.port})")
    write(f"{running.dsn}\n")


@server.command()
@pass_context
def stop(context: CliContext) -> None:
    """Stop it. Sessions end and uncommitted work is rolled back. The next command that needs it starts it again."""
    embedded = embedded_server(context.settings)
    if embedded.stop():
        say(f"the embedded server of {embedded.directory} has stopped; its data stays")
    else:
        say(f"the embedded server of {embedded.directory} does not run")
