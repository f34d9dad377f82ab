"""The errors of psycopg and SQLAlchemy as errors of this package."""

from __future__ import annotations

import re
import traceback
from typing import Final

import psycopg
import sqlalchemy

from eventsql_orchestration.database.log_names import topic_in
from eventsql_orchestration.errors import (
    ConfigurationError,
    ConnectionLostError,
    DatabaseBusyError,
    DatabaseError,
    DatabaseFullError,
    DatabaseUnavailableError,
    EventSQLError,
    SchemaOutdatedError,
    TopicNotFoundError,
    ValidationError,
)

_ENDED_FOR_TIME: Final = {
    "25P03": ("idle_in_transaction_session_timeout", "a session that stood still in a transaction"),
    "25P04": ("transaction_timeout", "a transaction that took too long"),
}
"""By SQLSTATE, the setting that makes the server end a session, and what it ends."""

_SHUT_OUT: Final = frozenset({"57P01", "57P03", "57P04", "57P05", "53300"}) | _ENDED_FOR_TIME.keys()
"""SQLSTATEs of a server that shuts down or starts, has no connection left, or ended the session for being idle."""

_DAMAGED: Final = ("58", "XX001", "XX002")
"""SQLSTATEs of files that are gone or cannot be used, and of data and indexes that are damaged."""

_CRASHED: Final = "57P02"
"""The SQLSTATE of all sessions if the server process of one of them dies, or the server stops in immediate mode."""

_CONNECTION: Final = ("08", _CRASHED)
"""SQLSTATEs about connections, and their class; a pooler whose server does not answer says 08P01."""

_LOST: Final = re.compile(
    r"(?:consuming input|sending [a-z ]+|flushing|receiving copy data) failed|the connection is lost|"
    r"server closed the connection|SSL |could not (?:receive|send) data|"
    r"server conn crashed|(?:query|transaction) timeout|admin forced disconnect"
)
"""The beginnings of the messages by which the driver or PgBouncer tells that an open connection to the server was lost.
All other errors without a SQLSTATE come from connecting."""

_DRIVERS: Final = ("psycopg", "sqlalchemy", "contextlib")


def driver_error(error: BaseException) -> BaseException | None:
    """Psycopg's error, even if SQLAlchemy has wrapped it."""
    return error.orig if isinstance(error, sqlalchemy.exc.DBAPIError) else error


def describe(error: psycopg.Error) -> str:
    """A driver's error in one line, without the details that repeat values."""
    return error.diag.message_primary or " ".join(str(error).split()) or type(error).__name__


def ended_for_time(error: BaseException) -> bool:
    """Whether an error, or its cause, says that the server ended a transaction because it idled or took too long."""
    told: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in told:
        if getattr(cause, "sqlstate", None) in _ENDED_FOR_TIME:
            return True
        told.append(cause)
        cause = cause.__cause__ or cause.__context__
    return False


def translate(error: Exception, where: str, schema: str) -> EventSQLError | None:
    """The error of this package with the meaning of a driver's error; None if the meaning is not known.

    `where` names the database without its password. A missing table or column counts only if it belongs to `schema`: a
    caller's own statement may lack a table of its own.
    """
    if isinstance(error, sqlalchemy.exc.TimeoutError):
        return DatabaseBusyError(f"{where}: every connection of this process is in use: use fewer threads at once")
    cause = driver_error(error)
    if not isinstance(cause, psycopg.Error):
        return None

    detail = describe(cause)
    kind: type[EventSQLError]
    match cause:
        case psycopg.errors.DiskFull() | psycopg.errors.OutOfMemory() | psycopg.errors.ConfigurationLimitExceeded():
            # The hint names a setting, for example max_locks_per_transaction where a call needs many tables.
            why = f"{detail}. {cause.diag.message_hint}" if cause.diag.message_hint else detail
            kind, meaning = DatabaseFullError, f"has no room left ({why}): nothing of this call was stored"
        case psycopg.errors.ReadOnlySqlTransaction():
            kind, meaning = DatabaseError, f"takes no writes ({detail}): is it a standby, or set to read only?"
        case psycopg.Error(sqlstate=str(sqlstate)) if sqlstate.startswith(_DAMAGED):
            kind, meaning = DatabaseError, f"cannot read or write its files ({detail}): look at the server's log"
        case psycopg.errors.QueryCanceled() | psycopg.errors.LockNotAvailable() | psycopg.errors.DeadlockDetected():
            kind, meaning = DatabaseBusyError, f"was too busy ({detail}): try again"
        case psycopg.errors.UndefinedTable() if (topic := topic_in(detail, schema)) is not None:
            kind, meaning = TopicNotFoundError, f"lacks the log of topic {topic!r}: the topic was deleted"
        case (
            psycopg.errors.UndefinedTable() | psycopg.errors.UndefinedColumn() | psycopg.errors.InvalidSchemaName()
        ) if re.search(rf"\b{re.escape(schema)}\b|eql_", detail):
            kind = SchemaOutdatedError
            meaning = f"lacks a table of the platform ({detail}): run `eventsql migrate`; {IF_LOST}"
        case psycopg.ProgrammingError(sqlstate=None) if "connection option" in detail:
            kind, meaning = ConfigurationError, f"has a URL that cannot be used ({detail})"
        case psycopg.OperationalError(sqlstate=sqlstate) if sqlstate is None or sqlstate.startswith(_CONNECTION):
            kind, meaning = _lost_or_unreachable(sqlstate, detail)
        case psycopg.Error(sqlstate=sqlstate) if sqlstate in _SHUT_OUT or _is_cut_off(cause, detail):
            kind, meaning = DatabaseUnavailableError, _closed(cause, detail)
        case _:
            return None
    return kind(f"{where} {meaning}")


_NO_SLOT: Final = ("too many clients", "too many connections for", "connection slots are reserved")
"""Words of a server that has as many connections as it may have, in total or for a role or database."""

MORE_CONNECTIONS: Final = "end sessions that nobody needs, raise the limit on connections, or use a pooler"
"""What helps if a server has no connection left."""

IF_LOST: Final = "if it was there before, rename it back or restore a backup instead"
"""What helps if a schema or a table was dropped or renamed. A migration would make an empty schema."""

IF_OF_JAVA: Final = "with --times-in ZONE if EventSQL's Java library made the tables on machines that are not in UTC"
"""What to decide before the first migration of existing tables. It adopts their times for ever."""

REFUSED: Final = "refused the connection"
"""Words of the error for a server that runs, and that lets this user not in."""

_REFUSAL: Final = re.compile(r"(?:FATAL:|fe_sendauth: (?=no password supplied)) *(.+)")
"""The reason of a server that lets the user not in. If it asks for a password, libpq itself says that it has none."""

_OF_TLS: Final = ("certificate ", "private key", "SSL error:", "not support SSL")
"""Words of libpq for a server that runs: a file of TLS, a certificate or the server's TLS is wrong or missing."""

_QUESTIONS: Final = {
    "no password supplied": "does the URL have the password?",
    "password": "are the user and the password in the URL right?",
    "does not exist": "are the user and the database in the URL right?",
    "pg_hba.conf": "does the server let this user in from this machine?",
}
"""The question to the user, by a word of the server's refusal. A refusal in another language gets no question."""


def has_no_slot(message: str) -> bool:
    """Whether a server that runs refused a connection because it has as many as it may have."""
    return any(words in message for words in _NO_SLOT)


def is_of_tls(message: str) -> bool:
    """Whether a server that runs was not reached because of TLS."""
    return any(words in message for words in _OF_TLS)


def _unreachable(detail: str) -> str:
    # libpq gives no SQLSTATE for a connection that failed. A server that answers says FATAL, and why.
    if found := _REFUSAL.search(detail):
        refused = found[1]
        question = next((question for word, question in _QUESTIONS.items() if word in refused), None)
        if has_no_slot(refused):
            question = MORE_CONNECTIONS
        return f"{REFUSED} ({refused})" + (f": {question}" if question else "")
    if detail == "the connection is closed":
        return "cannot be reached, because the connection was closed before: open another connection, and try again"
    # libpq asks this, too, after each address that it tried.
    failed = re.sub(r" Is the server running [^?]*\?", "", detail)
    running = "" if is_of_tls(failed) else "is the server running, "
    return f"cannot be reached ({failed}): {running}is the URL right?"


def _lost_or_unreachable(sqlstate: str | None, detail: str) -> tuple[type[EventSQLError], str]:
    if sqlstate != _CRASHED and not _LOST.match(detail):
        return DatabaseUnavailableError, _unreachable(detail)
    told = f"closed the connection ({detail}): is the server running? The work under way may have been committed or not"
    return ConnectionLostError, told


def _is_cut_off(error: psycopg.Error, detail: str) -> bool:
    # A pooler whose server ended the session before a COMMIT answers with two results; psycopg refuses them.
    return isinstance(error, psycopg.InternalError) and error.sqlstate is None and "result" in detail


def _closed(error: psycopg.Error, detail: str) -> str:
    if error.sqlstate in _ENDED_FOR_TIME:
        setting, ended = _ENDED_FOR_TIME[error.sqlstate]
        return (
            f"ended {ended} ({detail}): shorten the transaction, for example by smaller batches, or raise the setting "
            f"{setting} of the role"
        )
    return f"closed the connection ({detail}): is the server running?"


def translate_own(error: psycopg.Error, where: str, schema: str) -> EventSQLError:
    """The error of this package for any error of a statement that it ran."""
    known = translate(error, where, schema)
    if known is not None:
        return known

    detail = describe(error)
    match error:
        case psycopg.errors.InFailedSqlTransaction():
            return DatabaseError(
                f"{where}: an earlier error has aborted the transaction: roll it back, and begin a new transaction"
            )
        case psycopg.Error(sqlstate=str(sqlstate)) if sqlstate.startswith("40"):
            return DatabaseBusyError(f"{where} refused a transaction that conflicts with another ({detail}): try again")
        case psycopg.Error(sqlstate=None) if isinstance(error, psycopg.DataError) or detail.startswith("cannot adapt"):
            # The driver itself raised it: nothing was sent.
            return ValidationError(f"a value cannot be sent to {where}: {detail}")
        case psycopg.errors.UniqueViolation() if str(error.diag.constraint_name).endswith("_pkey"):
            detail += (
                ". If the sequence of its table is behind, as after a restore of the data alone or on a promoted "
                "logical replica, `eventsql doctor` names the statement that repairs it"
            )
        case psycopg.ProgrammingError(sqlstate=None):
            # This package raises it if a handler has ended its transaction.
            return DatabaseError(f"{where}: {detail}")
    return DatabaseError(f"{where} refused a statement: {detail}")


def ran_by_us(error: BaseException, pool: str) -> bool:
    """Whether this package ran the statement that failed, and not a caller's function or block.

    The innermost frame outside of the driver ran it. The module `pool` only commits statements that other code has run.
    """
    ran_by = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _DRIVERS:
            ran_by = module
    return ran_by != pool and ran_by.partition(".")[0] == __name__.partition(".")[0]
