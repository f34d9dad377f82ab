"""`eventsql server`: the embedded server of a directory, looked at, named and stopped."""

from __future__ import annotations

import click

from eventsql_orchestration.cli.context import CliContext, embedded_server, pass_context
from eventsql_orchestration.cli.output import say, show_fields, write, write_json
from eventsql_orchestration.cli.parameters import json_option


@click.group()
def server() -> None:
    """Look at the embedded server of this directory, print its URL, stop it.

    It is the one of --home, whatever database is named elsewhere. It runs until it is stopped, over the end of the
    command that started it; its data, port and password stay.
    """


@server.command()
@json_option
@pass_context
def status(context: CliContext, *, as_json: bool) -> None:
    """Show whether it runs, where its files are, its process, its port and PostgreSQL's version. Starts nothing."""
    embedded = embedded_server(context.settings)
    running = embedded.status()
    shown: dict[str, object] = {"directory": str(embedded.directory), "running": running is not None}
    if running is not None:
        shown |= {"pid": running.pid, "port": running.port, "version": running.version()}
    if as_json:
        write_json(shown)
    else:
        # Numbers that are names: without separators.
        show_fields(
            {name: value if value is None or isinstance(value, bool) else str(value) for name, value in shown.items()}
        )


@server.command()
@pass_context
def url(context: CliContext) -> None:
    """Print its URL, password included; starts it where it does not run.

    For whatever else takes one from its environment: EVENTSQL_DSN=$(eventsql server url).
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
    """Stop it. Sessions end, what they had not committed is rolled back; the next command that needs it starts it."""
    embedded = embedded_server(context.settings)
    if embedded.stop():
        say(f"the embedded server of {embedded.directory} has stopped; its data stays")
    else:
        say(f"the embedded server of {embedded.directory} does not run")
