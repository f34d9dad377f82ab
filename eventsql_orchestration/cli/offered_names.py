"""The topics, consumers, queues and shards that Tab offers in the shell.

Tab has to be quick, so this module asks the database with psycopg alone.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from eventsql_orchestration.cli import lazy
from eventsql_orchestration.cli.urls import ASK, urls_of_file
from eventsql_orchestration.validation import DEFAULT_SCHEMA, split_urls

_SECONDS: Final = 2
"""The longest wait for a database that does not answer."""

_PLAIN: Final = re.compile(r"[\w@%+=:,./-]+")
"""Names without characters that a shell obeys. A shell puts the chosen name into its line, and would run a `$(…)`."""

_STATEMENTS: Final = {"topic": "topics", "consumer": "consumers", "queue": "queues", "shard": "shards"}
"""The statement that finds the names of a kind."""


def offered(context: click.Context, kind: str, begun: str) -> list[CompletionItem]:
    """The names of a kind that begin with `begun`; none if the database does not answer, and for any other kind.

    The consumers are those of the topic that stands before them on the command line.
    """
    if kind not in _STATEMENTS:
        return []
    # A shell that completes has no place for an error.
    with suppress(Exception):
        given = context.find_root().params
        dsn = _database(given)
        query = lazy.Queries("completion", str(_setting(given, "schema") or DEFAULT_SCHEMA))(_STATEMENTS[kind])
        with (
            closing(lazy.connect(dsn, connect_timeout=_SECONDS, autocommit=True)) as connection,
            connection.transaction(),
        ):
            # Set it for this transaction alone: behind a pooler, the session serves other programs afterwards.
            connection.execute("SET LOCAL statement_timeout = '2s'")
            found = connection.execute(query, {"begun": begun, "topic": context.params.get("topic")})
            return [CompletionItem(name) for (name,) in found if _PLAIN.fullmatch(name)]
    return []


def _database(given: Mapping[str, Any]) -> str:
    """The URL of the database, or of the first shard, for psycopg."""
    named = _setting(given, "dsn") if given.get("dsn_file") is None else urls_of_file(given["dsn_file"])
    if not named:
        home = Path(_setting(given, "home") or ".eventsql")
        running = lazy.EmbeddedPostgres(home / "postgres").status()
        return "" if running is None else running.dsn
    urls = named if isinstance(named, list | tuple) else split_urls(named)
    if ASK in urls:
        raise ValueError("a URL that is asked for")
    # Remove the parts that libpq does not know: the driver in the scheme, and `direct`, the way past a pooler.
    return re.sub(r"([?&])direct=[^&]*&?", r"\1", re.sub(r"^postgres(ql)?(\+\w+)?:", "postgresql:", urls[0]))


def _setting(given: Mapping[str, Any], name: str) -> Any:
    """A setting as `Settings` finds it. Reading all of them takes longer than a completion may take."""
    if found := given.get(name) or os.environ.get(f"EVENTSQL_{name.upper()}"):
        return found
    with suppress(OSError):
        return tomllib.loads(Path("eventsql.toml").read_text(encoding="utf-8")).get(name)
    return None
