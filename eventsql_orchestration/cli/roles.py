"""`eventsql roles`: PostgreSQL roles for publishing, transfer, consuming and reading."""

from __future__ import annotations

from typing import Any

import click

from eventsql_orchestration.cli.context import CliContext, pass_context
from eventsql_orchestration.cli.output import say, show_table, write_json
from eventsql_orchestration.cli.parameters import json_option
from eventsql_orchestration.database.grants import DEFAULT_PREFIX
from eventsql_orchestration.database.roles import Roles

_prefix_option = click.option(
    "--prefix",
    default=DEFAULT_PREFIX,
    show_default=True,
    help="Prefix of the names: roles belong to a server.",
)
_topic_option = click.option(
    "--topic", "topics", multiple=True, metavar="TOPIC", help="Roles of this topic; repeat it."
)


@click.group()
def roles() -> None:
    """Create, list and drop roles with the least rights for each work."""


@roles.command(short_help="Create the roles, or give existing roles the rights that they lack.")
@_prefix_option
@_topic_option
@click.option("--print", "printed", is_flag=True, help="Print the SQL and change nothing.")
@pass_context
def create(context: CliContext, *, prefix: str, topics: tuple[str, ...], printed: bool) -> None:
    """Create the roles, or give existing roles the rights that they lack.

    The roles are PREFIX_admin, PREFIX_transfer, PREFIX_publisher, PREFIX_stager, PREFIX_consumer and PREFIX_reader.
    They may not log in: grant them to the logins of your services. --topic also creates a publisher, a consumer and a
    reader for that topic alone, such as PREFIX_publisher_TOPIC. Safe to run again.

    PREFIX_admin becomes the owner of the platform's tables, and their former owner becomes a member of it.
    """
    if printed:
        _print(context, prefix, topics)
        return
    with context.platform() as platform:
        made = [Roles(shard.database).create(prefix=prefix, topics=topics) for shard in platform.shards]
    say(f"there are roles {', '.join(role.name for role in made[0])}: grant them to your logins, as in")
    say(f"    CREATE ROLE my_service LOGIN PASSWORD '…'; GRANT {prefix}_publisher TO my_service;")


@roles.command(short_help="Print the SQL of `create`, to apply it by hand.")
@_prefix_option
@_topic_option
@pass_context
def sql(context: CliContext, *, prefix: str, topics: tuple[str, ...]) -> None:
    """Print the SQL of `eventsql roles create`, to apply it by hand."""
    _print(context, prefix, topics)


def _print(context: CliContext, prefix: str, topics: tuple[str, ...]) -> None:
    with context.platform() as platform:
        for shard in platform.shards:
            click.echo(Roles(shard.database).sql(prefix=prefix, topics=topics), nl=False)


@roles.command("list", short_help="List the roles and their members.")
@json_option
@pass_context
def list_roles(context: CliContext, *, as_json: bool) -> None:
    """List the roles of this installation and their members."""
    with context.platform() as platform:
        states = [state for shard in platform.shards for state in Roles(shard.database).states()]
    rows: dict[str, dict[str, Any]] = {
        state.role.name: {
            "role": state.role.name,
            "kind": state.role.kind,
            "topic": state.role.topic,
            "members": list(state.members),
        }
        for state in states
    }
    if as_json:
        write_json(list(rows.values()))
    elif rows:
        show_table(
            ["role", "does", "topic", "members"],
            [(row["role"], row["kind"], row["topic"] or "all", ", ".join(row["members"])) for row in rows.values()],
        )
    else:
        say("there are no roles: `eventsql roles create` makes them")


@roles.command(short_help="Drop the roles of some topics, or all roles of this installation.")
@_topic_option
@click.option("--all", "everything", is_flag=True, help="All roles. The current role gets the platform's tables.")
@pass_context
def drop(context: CliContext, *, topics: tuple[str, ...], everything: bool) -> None:
    """Drop the roles of topics, or all roles of this installation. Events and logins stay."""
    if everything == bool(topics):
        raise click.UsageError("name the topics whose roles are to go, with --topic, or --all")
    with context.platform() as platform:
        dropped = [role.name for shard in platform.shards for role in Roles(shard.database).drop(topics=topics)]
    say(f"dropped {', '.join(dict.fromkeys(dropped))}" if dropped else "there are no such roles")
