"""Whether the tables of a database stop growing, round after round of a use, with a month after each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from psycopg import sql

from eventsql_orchestration import EventSQL, Shard

Round: TypeAlias = Callable[[EventSQL, int], None]

SETTLED = 3
"""Rounds, each of a month, after which nothing grows any more."""

MEASURED = 2


def rows(platform: EventSQL | Shard) -> dict[str, int]:
    """How many rows each table has; and how many tables there are."""
    with platform.database.connection() as connection:
        names = [
            name
            for (name,) in connection.execute(
                "SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
                "WHERE nspname = 'eventsql' AND relkind IN ('r', 'p') AND NOT relispartition"
            )
        ]
        counts = {"tables": len(names)}
        for name in names:
            query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier("eventsql", name))
            row = connection.execute(query).fetchone()
            counts[name] = 0 if row is None else int(row[0])
        row = connection.execute(
            "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
            "WHERE nspname = 'eventsql' AND relispartition"
        ).fetchone()
        return {**counts, "segments": 0 if row is None else int(row[0])}


def let_a_month_pass(platform: EventSQL | Shard) -> None:
    """Everything that is there is 31 days older."""
    with platform.database.connection() as connection:
        columns = connection.execute(
            "SELECT c.relname, a.attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid "
            "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'eventsql' "
            "AND c.relkind IN ('r', 'p') AND NOT c.relispartition AND a.atttypid = 'timestamptz'::regtype "
            "AND a.attnum > 0 AND NOT a.attisdropped"
        ).fetchall()
        for table, column in columns:
            connection.execute(
                sql.SQL("UPDATE {} SET {} = {} - interval '31 days'").format(
                    sql.Identifier("eventsql", table), sql.Identifier(column), sql.Identifier(column)
                )
            )


def grown(platform: EventSQL, live: Round) -> dict[str, tuple[int, int]]:
    """The tables that grow though they had time to settle: with the most rows before and after."""
    seen: list[dict[str, int]] = []
    for number in range(SETTLED + 2 * MEASURED):
        live(platform, number)
        platform.retention.run_once()
        seen.append({f"{table} {shard.name or ''}": n for shard in platform.shards for table, n in rows(shard).items()})
        for shard in platform.shards:
            let_a_month_pass(shard)
    most = [
        {table: max(counts.get(table, 0) for counts in part) for table in seen[-1]}
        for part in (seen[SETTLED : SETTLED + MEASURED], seen[SETTLED + MEASURED :])
    ]
    # Rows that go by the segment go up and down. What grows in each round grows by more than a quarter.
    return {table: (most[0][table], most[1][table]) for table in most[1] if most[1][table] > 1.25 * most[0][table]}
