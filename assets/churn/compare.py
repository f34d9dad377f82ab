"""Compares table churn.directory_churn with a count over files of changes, row by row, without Spark or the log.

    python -m assets.churn.compare file_changes.jsonl [more.jsonl.gz …]

Only the repositories that the files name are compared. The database is the one of EVENTSQL_DSN, as for the code
location; for the embedded server of this directory, set EVENTSQL_DSN=$(eventsql server url).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from assets.churn.counting import count, differing, stored
from eventsql_orchestration import Database


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, compressed or not."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            yield json.loads(line)


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--dsn", envvar="EVENTSQL_DSN", required=True, metavar="URL", help="The database, or EVENTSQL_DSN.")
@click.option("--schema", envvar="EVENTSQL_SCHEMA", default="eventsql", help="Its schema, or EVENTSQL_SCHEMA.")
def main(files: tuple[Path, ...], dsn: str, schema: str) -> None:
    """Compare and say what differs; ends with 1 when anything does."""
    expected = count(change for path in files for change in read(path))
    with Database(dsn, schema=schema) as database, database.transaction() as connection:
        found = stored(connection, {repo for repo, _, _ in expected})
    wrong = differing(expected, found)
    for key in wrong[:10]:
        click.echo(f"{' '.join(key)}: the files say {expected.get(key)}, the table says {found.get(key)}")
    total = sum(changes for changes, _, _ in expected.values())
    click.echo(f"{total} file changes in {len(expected)} rows; {len(wrong)} rows differ")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
