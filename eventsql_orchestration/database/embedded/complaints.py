"""What is said when the embedded server fails: what the server complained of, and what to do about it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg

from eventsql_orchestration.errors import EmbeddedServerError

_ADVICE: Mapping[str, str] = {
    r"No space left on device|Disk quota exceeded": "free some space on its disk, then start it again",
    r"Address already in use|could not bind": "another program holds its port: start it again",
    r"Cannot allocate memory|could not map anonymous shared memory": "free some memory, then start it again",
    r"initialized by PostgreSQL version": (
        "its data was made by another PostgreSQL version: install the version of this package that made it, or name "
        "the programs of that PostgreSQL by EVENTSQL_POSTGRES"
    ),
    r"Permission denied|Operation not permitted|Read-only file system|has wrong ownership|invalid permissions": (
        "give this user the right to write there, or choose another directory"
    ),
    r"Directory not empty": "it has files but no database in it: move them away, then start it again",
    r"still in use": "processes of a killed server still hold its memory: end them, then start it again",
    r"PANIC|PG_CONTROL_VERSION|checkpoint record|invalid data|incorrect checksum|could not (read|locate|open) "
    r"|is not a valid data directory|is empty": (
        "its data is damaged: restore the data directory from a copy, or move it away to begin with an empty one"
    ),
}
"""What to do about what the server says, by what it says; the first match counts."""


@contextlib.contextmanager
def os_errors(failed: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise failure(failed, f"{error.strerror or error}{where}") from error


@contextlib.contextmanager
def database_errors(failed: str, log: Path) -> Iterator[None]:
    try:
        yield
    except psycopg.errors.DuplicateDatabase:
        raise EmbeddedServerError(f"{failed}: it exists; choose another name, or drop it first") from None
    except psycopg.errors.ObjectInUse as error:
        raise EmbeddedServerError(f"{failed}: {error.diag.message_primary}; close the connections to it") from error
    except psycopg.Error as error:
        raise failure(failed, error.diag.message_primary or str(error), log) from error


def failure(failed: str, said: str, log: Path | None = None) -> EmbeddedServerError:
    """The error for what failed: the last that the server said, and what to do about it."""
    default = "read what it says and start it again" if log is None else f"read {log}"
    advice = next((advice for pattern, advice in _ADVICE.items() if re.search(pattern, said)), default)
    return EmbeddedServerError(f"{failed}: {_last_words(said)}; {advice}")


def _last_words(said: str) -> str:
    """The last complaint in a log with what belongs to it, on one line; the last line where nothing complains."""
    words: list[str] = []
    for line in said.splitlines():
        found = re.search(r"(?:^|\s|: )(PANIC|FATAL|ERROR|error|fatal|DETAIL|HINT|detail|hint):\s+(.*)", line)
        if found is None:
            continue
        if found[1].lower() in ("detail", "hint"):
            words.append(found[2])
        else:
            words = [found[2]]
    if not words:
        words = [line.strip() for line in said.splitlines() if line.strip()][-1:]
    return " - ".join(words) or "it said nothing"


def read_from(path: Path, beginning: int = 0) -> str:
    """The log from a place on; of a long one the last 64 KiB."""
    with path.open("rb") as file:
        file.seek(max(beginning, path.stat().st_size - 65536))
        return file.read().decode(errors="replace")
