"""Failures of statements for lack of room: a smaller batch may succeed, or the same batch once there is room."""

from __future__ import annotations

from typing import Final

import psycopg

from eventsql_orchestration.database.translation import describe
from eventsql_orchestration.errors import DatabaseFullError

_TOO_MUCH: Final = ("53000", "53100", "53200", "53400", "54", "57014")
"""SQLSTATEs and one class: resources, disk, memory, `temp_file_limit`, program limits, `statement_timeout`."""


def too_much(error: BaseException) -> bool:
    """Whether a statement failed because of the amount of its work, so that a smaller batch may succeed.

    `error` is the driver's error, an error of this package with it as the cause, or a lack of memory in this process.
    """
    cause = _cause(error)
    state = cause.sqlstate if isinstance(cause, psycopg.Error) else None
    return isinstance(error, MemoryError) or (state is not None and state.startswith(_TOO_MUCH))


def disk_is_full(error: BaseException) -> bool:
    """Whether the server's disk was full: no event or message of a handler is to blame."""
    return isinstance(_cause(error), psycopg.errors.DiskFull)


def raise_if_disk_is_full(error: BaseException) -> None:
    """Raise `DatabaseFullError` for a handler's error if the server's disk was full.

    The handler may have wrapped the driver's error, and the server may be another one: the new error names none.
    """
    cause = _cause(error)
    if isinstance(cause, psycopg.errors.DiskFull):
        raise DatabaseFullError(
            f"a server that the handler writes to has no room left ({describe(cause)}): the handler is called again, "
            "and no attempt is counted"
        ) from cause


def _cause(error: BaseException) -> BaseException | None:
    return error if isinstance(error, psycopg.Error) else error.__cause__
