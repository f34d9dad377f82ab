"""Handlers, the functions of users that take events: which functions can be one, and how one is called."""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from eventsql_orchestration.consuming.partition import ROLLED_BACK, TRANSACTION_ENDED, transaction_lost
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import ValidationError
from eventsql_orchestration.model import Event, Publication
from eventsql_orchestration.signatures import signature_of

Given = TypeVar("Given")
Returned = TypeVar("Returned")

BatchHandler: TypeAlias = Callable[[Sequence[Event], Connection], object]
"""Takes events in order, and the connection whose transaction commits their offset."""

EventHandler: TypeAlias = Callable[[Event, Connection], object]
"""Takes one event, and the connection whose transaction commits its offset."""

OF_HANDLER: Final = (Exception, CancelledError, SystemExit)
"""The errors that count as failures of a handler. They include `asyncio.CancelledError`, from a task that the handler
ran, and `sys.exit()`. A caller outside of an orchestrator's run raises a `sys.exit()` again if it `ends_program`."""

_NOT_RUN: Final = (inspect.isawaitable, inspect.isgenerator, inspect.isasyncgen)


def errors_of_handler() -> tuple[type[BaseException], ...]:
    """The errors of a handler that count as its failures in this thread. Call it in an `except` clause.

    In the main thread, they are `OF_HANDLER`, and a panic of a library in Rust, which is no `Exception`: Ctrl-C, and
    signals of orchestrators, raise other errors there. In another thread, only the handler raises errors.
    """
    if threading.current_thread() is not threading.main_thread():
        return (BaseException,)
    error = sys.exception()
    return (*OF_HANDLER, type(error)) if error is not None and _is_panic(error) else OF_HANDLER


def _is_panic(error: BaseException) -> bool:
    """Whether an error is a panic. Each library that is built with PyO3 has a class of its own for it."""
    return (type(error).__module__, type(error).__name__) == ("pyo3_runtime", "PanicException")


def ends_program(error: BaseException) -> bool:
    """Whether an error is `sys.exit()` in the main thread, which may end the program."""
    return isinstance(error, SystemExit) and threading.current_thread() is threading.main_thread()


def is_asynchronous(function: object) -> bool:
    """Whether a call only returns an awaitable or an asynchronous generator."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def check_handler(handler: object, *arguments: str, named: Iterable[str] = ()) -> None:
    """Raise `ValidationError` unless `handler` takes these arguments and runs when it is called.

    It gets `arguments` by position, and then `named` by name.

    A call of a coroutine function or a generator function runs nothing, and its events would count as consumed.
    """
    by_name = {name: name for name in named}
    given = ", ".join([*arguments, *(f"{name}=…" for name in by_name)])
    if not callable(handler):
        raise ValidationError(f"a handler is a function of ({given}), not {handler!r}")
    check_runs(handler)
    try:
        # The signature of the called function, which may pass further arguments to a wrapped one.
        signature = signature_of(handler, follow_wrapped=False)
    except ValueError:
        # Some functions written in C have no signature.
        return
    try:
        signature.bind(*arguments, **by_name)
    except TypeError as error:
        raise ValidationError(f"handler {_name(handler)}{signature} cannot be called with ({given}): {error}") from None


def check_runs(handler: Callable[..., object]) -> None:
    """Raise `ValidationError` for a coroutine or generator function: calling it runs nothing."""
    for function in (handler, getattr(handler, "__call__", None)):  # noqa: B004 - a partial has none of its own
        if is_asynchronous(function):
            raise ValidationError(
                f"handler {_name(handler)} is asynchronous and would never run: make it a plain function, which runs a "
                "coroutine by `asyncio.run_coroutine_threadsafe(…, loop).result()`"
            )
        if inspect.isgeneratorfunction(function):
            raise ValidationError(
                f"handler {_name(handler)} is a generator function and would never run: remove `yield`"
            )


def _name(handler: object) -> str:
    return getattr(handler, "__qualname__", None) or repr(handler)


def check_returned(returned: object) -> None:
    """Raise `TypeError` if a handler returned an awaitable, a generator or publications: nobody would use them."""
    if returned is None:
        return
    check_ran(returned)
    # A result of Dagster is a tuple that refuses an index.
    first = returned[0] if (type(returned) is list or type(returned) is tuple) and returned else returned
    if isinstance(first, Publication):
        raise TypeError(
            "the handler returned publications, which nobody publishes: publish them in the handler, through its "
            "connection"
        )


def check_ran(returned: object) -> None:
    """Raise `TypeError` if a handler returned an awaitable or a generator, as a lambda around a coroutine does."""
    if not any(of_kind(returned) for of_kind in _NOT_RUN):
        return
    if inspect.iscoroutine(returned):
        # Python would warn that nothing awaited it.
        returned.close()
    raise TypeError(
        "the handler returned an awaitable or a generator, which has not run: run a coroutine by "
        "`asyncio.run_coroutine_threadsafe(…, loop).result()`, and loop over a generator"
    )


def one_by_one(handler: EventHandler) -> BatchHandler:
    """A handler of batches that calls a handler of single events."""

    def handle_events(events: Sequence[Event], connection: Connection) -> None:
        for event in events:
            check_returned(handler(event, connection))

    return handle_events


def call_handler(connection: Connection, given: Given, handler: Callable[[Given, Connection], Returned]) -> Returned:
    """Call a handler of events, messages or changes in a transaction; gives what it returned.

    Raises the handler's error, and `psycopg.ProgrammingError` if the handler ended the transaction.
    """
    try:
        returned = handler(given, connection)
    except BaseException as error:
        _end_stream(connection, error)
        if isinstance(error, psycopg.Rollback):
            # psycopg would take the error for success, and the events would pass without their effects.
            raise psycopg.ProgrammingError(ROLLED_BACK) from error
        raise
    check_returned(returned)
    _end_stream(connection, None)
    if transaction_lost(connection):
        raise psycopg.ProgrammingError(TRANSACTION_ENDED)
    return returned


def _end_stream(connection: Connection, error: BaseException | None) -> None:
    """End a `cursor.stream()` of a handler: it keeps a lock of psycopg's, and the end of the transaction would wait.

    The frames of the handler's error may refer to it. If another object does, the connection is closed.
    """
    while connection.pgconn.transaction_status == TransactionStatus.ACTIVE:
        if error is None:
            connection.close()
            return
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
