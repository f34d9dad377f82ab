"""`eventsql roles`: PostgreSQL roles for publishing, transfer, consuming and reading."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import click

from eventsql_orchestration.cli.context import CliContext
from eventsql_orchestration.cli.output import say, say_plan, write
from eventsql_orchestration.cli.parameters import AsJson, command, executing, option
from eventsql_orchestration.cli.tables import Columns, same, show_list
from eventsql_orchestration.database.grants import DEFAULT_PREFIX
from eventsql_orchestration.database.roles import Roles

_Prefix: TypeAlias = Annotated[
    str, option("Prefix of the names: all databases of a server share its roles.", default=DEFAULT_PREFIX)
]
_Topics: TypeAlias = Annotated[tuple[str, ...], option("Roles of this topic; repeat it.", "--topic", metavar="TOPIC")]


@click.group()
def roles() -> None:
    """Create, list and drop roles with the least rights for each task."""


@command(roles)
def create(context: CliContext, prefix: _Prefix, topics: _Topics) -> None:
    """Create the roles, or give existing roles the rights that they lack.

    The roles are PREFIX_admin, PREFIX_transfer, PREFIX_publisher, PREFIX_stager, PREFIX_consumer, PREFIX_reader,
    PREFIX_eraser, PREFIX_sender and PREFIX_worker. They may not log in: grant them to the logins of your services.
    --topic also creates a publisher, a consumer and a reader for that topic alone, such as PREFIX_publisher_TOPIC.
    Safe to run again.

    PREFIX_admin becomes the owner of the platform's tables, and their former owner becomes a member of it.
    """
    with context.platform() as platform:
        made = [Roles(shard.database).create(prefix=prefix, topics=topics) for shard in platform.shards]
    say(f"there are roles {', '.join(role.name for role in made[0])}: grant them to your logins, as in")
    say(f"    CREATE ROLE my_service LOGIN PASSWORD '…'; GRANT {prefix}_publisher TO my_service;")


@command(roles)
def sql(context: CliContext, prefix: _Prefix, topics: _Topics) -> None:
    """Print the SQL of `eventsql roles create`, to apply it by hand."""
    with context.platform() as platform:
        for shard in platform.opened():
            if shard.name is not None:
                write(f"-- Shard {shard.name}, {shard.database}\n")
            write(Roles(shard.database).sql(prefix=prefix, topics=topics))


@command(roles, "list")
def list_roles(context: CliContext, as_json: AsJson) -> None:
    """List the roles of this installation and their members."""
    with context.platform() as platform:
        found = [(shard.name, state) for shard in platform.opened() for state in Roles(shard.database).states()]
    rows: list[dict[str, Any]] = [
        {
            **context.on_shard(shard),
            "role": state.role.name,
            "kind": state.role.kind,
            "topic": state.role.topic,
            "members": list(state.members),
        }
        for shard, state in found
    ]
    if not rows and not as_json:
        say("there are no roles: `eventsql roles create` makes them")
        return
    columns: Columns = {
        **same("shard", "role"),
        "does": "kind",
        "topic": lambda row: row["topic"] or "all",
        "members": lambda row: ", ".join(row["members"]),
    }
    show_list(rows, columns, as_json=as_json, json=dict)


@command(roles)
def drop(
    context: CliContext,
    topics: _Topics,
    everything: Annotated[bool, option("All roles. The current role gets the platform's tables.", "--all")],
    execute: Annotated[bool, executing("Drop them")],
) -> None:
    """Drop the roles of topics, or all roles of this installation. Events and logins stay.

    A plan and, with --execute, the drop. The logins that are members lose the rights of these roles.
    """
    if everything == bool(topics):
        raise click.UsageError("name the topics whose roles to drop with --topic, or give --all")
    members: set[str] = set()
    with context.platform() as platform:
        dropped: list[str] = []
        for shard in platform.shards:
            roles = Roles(shard.database)
            states = [state for state in roles.states() if not topics or state.role.topic in topics]
            members |= {member for state in states for member in state.members}
            dropped += [role.name for role in (roles.drop(topics=topics) if execute else [s.role for s in states])]
    names = ", ".join(dict.fromkeys(dropped))
    if not names:
        say("there are no such roles")
    elif execute:
        say(f"dropped {names}")
    else:
        say_plan(f"{names} would be dropped; their members are {', '.join(sorted(members)) or 'no logins'}")
