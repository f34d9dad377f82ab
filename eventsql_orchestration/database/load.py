"""Failures of statements on large batches: a smaller batch may succeed."""

from __future__ import annotations

from typing import Final

import psycopg

_TOO_MUCH: Final = ("53000", "53100", "53200", "53400", "54", "57014")
"""SQLSTATEs and one class: resources, disk, memory, `temp_file_limit`, program limits, `statement_timeout`."""


def too_much(error: BaseException) -> bool:
    """Whether a statement failed because of the amount of its work, so that a smaller batch may succeed.

    `error` is the driver's error, an error of this package with it as the cause, or a lack of memory in this process.
    """
    cause = error if isinstance(error, psycopg.Error) else error.__cause__
    state = cause.sqlstate if isinstance(cause, psycopg.Error) else None
    return isinstance(error, MemoryError) or (state is not None and state.startswith(_TOO_MUCH))
