"""The file changes of a git repository's own history, one JSON object a line, oldest first.

    python -m assets.churn.git_history /path/to/repository > file_changes.jsonl

Each line names the repository, the commit (12 digits), its time in UTC, a path, and the lines added and deleted (null
for a binary file). Merge commits are left out, as `git log` leaves their changes out; a renamed file counts under its
new path.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

LAST_COMMIT: Final = "last commit"
"""In the metadata of an event and of an asset: the commit up to which the history is published."""

_COMMIT = "\x01"


def file_changes(
    repository: Path, *, name: str | None = None, since: str | None = None, limit: int | None = None
) -> Iterator[dict[str, Any]]:
    """The changes in the history of `repository`'s current commit, without those in the history of commit `since`.

    With `limit`, only those of this number of newest commits. `name` is the name of the repository in the changes, by
    default that of `name_of`. Raises `ValueError` when there is no git repository, no such commit, or no git.
    """
    command = ["git", "-C", str(repository), "log", "--reverse", "--numstat", "-z", "-M", f"--format={_COMMIT}%H %ct"]
    if limit is not None:
        command.append(f"--max-count={limit}")
    command.append("HEAD" if since is None else f"{since}..HEAD")
    try:
        log = subprocess.run(command, capture_output=True, check=True)
    except FileNotFoundError:
        raise ValueError("git is not installed") from None
    except subprocess.CalledProcessError as error:
        detail = error.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(f"{repository} has no git history: {detail[-1] if detail else 'git log failed'}") from None
    yield from _parse(name or name_of(repository), log.stdout.decode(errors="replace"))


def name_of(repository: Path) -> str:
    """The name of a repository in its changes: that of its directory."""
    return repository.resolve().name


def new_changes(repository: Path, *, since: str | None, limit: int) -> list[dict[str, Any]]:
    """The changes of the newest commits, at most `limit`, that came after commit `since`.

    A history that was rewritten, and so has no such commit any more, begins anew. Raises as `file_changes`.
    """
    if since is not None:
        with contextlib.suppress(ValueError):
            return list(file_changes(repository, since=since, limit=limit))
    return list(file_changes(repository, limit=limit))


def _parse(repo: str, log: str) -> Iterator[dict[str, Any]]:
    fields = iter(log.split("\x00"))
    commit = committed_at = ""
    for raw in fields:
        field = raw.lstrip("\n")
        if field.startswith(_COMMIT):
            commit, seconds = field.removeprefix(_COMMIT).split()
            committed_at = datetime.fromtimestamp(int(seconds), UTC).isoformat()
        elif field:
            added, deleted, path = field.split("\t", 2)
            if not path:  # a rename: the old and the new path follow
                next(fields)
                path = next(fields)
            yield {
                "repo": repo,
                "commit": commit[:12],
                "committed_at": committed_at,
                "path": path,
                "added": None if added == "-" else int(added),
                "deleted": None if deleted == "-" else int(deleted),
            }


@click.command(help=__doc__)
@click.argument("repository", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".")
@click.option("--name", help="The name of the repository in the changes; by default the name of its directory.")
def main(repository: Path, name: str | None) -> None:
    """Write the file changes to standard output."""
    try:
        for change in file_changes(repository, name=name):
            click.echo(json.dumps(change, ensure_ascii=False, separators=(",", ":")))
    except ValueError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
