"""`eventsql roles`: roles of PostgreSQL for those who publish, transfer, consume and read."""

from __future__ import annotations

from typing import Any

import click

from eventsql_orchestration.cli.context import CliContext, pass_context
from eventsql_orchestration.cli.output import say, show_table, write_json
from eventsql_orchestration.cli.parameters import json_option
from eventsql_orchestration.database.grants import DEFAULT_PREFIX
from eventsql_orchestration.database.roles import Roles

_prefix_option = click.option(
    "--prefix", default=DEFAULT_PREFIX, show_default=True, help="What the names begin with: roles belong to a server."
)
_topic_option = click.option("--topic", "topics", multiple=True, metavar="TOPIC", help="Of this topic; repeat it.")


@click.group()
def roles() -> None:
    """Create, list and drop roles with the least rights for each work."""


@roles.command(short_help="Create the roles, or give those there are the rights that they lack.")
@_prefix_option
@_topic_option
@click.option("--print", "printed", is_flag=True, help="Print the SQL and change nothing.")
@pass_context
def create(context: CliContext, *, prefix: str, topics: tuple[str, ...], printed: bool) -> None:
    """Create the roles, or give those that there are the rights that they lack.

    They are PREFIX_admin, PREFIX_transfer, PREFIX_publisher, PREFIX_stager, PREFIX_consumer and PREFIX_reader, none of
    which may log in: grant them to the logins of your services. With --topic, a publisher, a consumer and a reader of
    that topic alone as well, such as PREFIX_publisher_TOPIC. Safe to run again.

    PREFIX_admin becomes the owner of the platform's tables, and their owner a member of it.
    """
    if printed:
        _print(context, prefix, topics)
        return
    with context.platform() as platform:
        made = [Roles(shard.database).create(prefix=prefix, topics=topics) for shard in platform.shards]
    say(f"there are roles {', '.join(role.name for role in made[0])}: grant them to your logins, as in")
    say(f"    CREATE ROLE my_service LOGIN PASSWORD '…'; GRANT {prefix}_publisher TO my_service;")


@roles.command(short_help="Print the SQL of `create`, for those who apply it by hand.")
@_prefix_option
@_topic_option
@pass_context
def sql(context: CliContext, *, prefix: str, topics: tuple[str, ...]) -> None:
    """Print the SQL of `eventsql roles create`, for those who apply it by hand."""
    _print(context, prefix, topics)


def _print(context: CliContext, prefix: str, topics: tuple[str, ...]) -> None:
    with context.platform() as platform:
        for shard in platform.shards:
            click.echo(Roles(shard.database).sql(prefix=prefix, topics=topics), nl=False)


@roles.command("list", short_help="List the roles, and who is a member of each.")
@json_option
@pass_context
def list_roles(context: CliContext, *, as_json: bool) -> None:
    """List the roles of this installation, and who is a member of each."""
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


@roles.command(short_help="Drop the roles of some topics, or all of this installation.")
@_topic_option
@click.option("--all", "everything", is_flag=True, help="All roles; the platform's tables become the current role's.")
@pass_context
def drop(context: CliContext, *, topics: tuple[str, ...], everything: bool) -> None:
    """Drop the roles of topics, or all of this installation. No event and no login is dropped."""
    if everything == bool(topics):
        raise click.UsageError("name the topics whose roles are to go, with --topic, or --all")
    with context.platform() as platform:
        dropped = [role.name for shard in platform.shards for role in Roles(shard.database).drop(topics=topics)]
    say(f"dropped {', '.join(dict.fromkeys(dropped))}" if dropped else "there are no such roles")
