"""What a consumer's handler must be: known before the first event is handed to it."""

from __future__ import annotations

import inspect
from typing import Final

from eventsql_orchestration.errors import ValidationError

_STILL_TO_RUN: Final = (inspect.isawaitable, inspect.isgenerator, inspect.isasyncgen)


def is_asynchronous(function: object) -> bool:
    """Whether a call of a function runs nothing of it, because somebody is to await it, or to iterate over it so."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def check_handler(handler: object, *arguments: str) -> None:
    """Raise `ValidationError` unless `handler` takes these arguments, by position, and works when it is called.

    The call of a coroutine function, or of a generator function, runs nothing of it, and its events would count as
    consumed.
    """
    called = ", ".join(arguments)
    if not callable(handler):
        raise ValidationError(f"a handler is a function of ({called}), not {handler!r}")
    name = getattr(handler, "__qualname__", None) or repr(handler)
    for function in (handler, getattr(handler, "__call__", None)):  # noqa: B004 - a partial has none of its own
        if is_asynchronous(function):
            raise ValidationError(
                f"handler {name} is asynchronous, and nothing awaits it: make it a plain function, which may call "
                "asyncio.run"
            )
        if inspect.isgeneratorfunction(function):
            raise ValidationError(f"handler {name} is a generator, of which a call runs nothing: leave out its yield")
    try:
        # Of what is called, and not of what it may wrap and hand further arguments to.
        signature = inspect.signature(handler, follow_wrapped=False)
    except ValueError:
        # Some of those that are written in C have none.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ValidationError(f"handler {name}{signature} cannot be called with ({called}): {error}") from None


def check_returned(returned: object) -> None:
    """Raise `TypeError` for what a handler returned that is still to be run, as a lambda around a coroutine does."""
    if returned is None or not any(of_kind(returned) for of_kind in _STILL_TO_RUN):
        return
    if inspect.iscoroutine(returned):
        # Or it would be complained of that nobody has awaited it.
        returned.close()
    raise TypeError("the handler returned what is still to be awaited, or iterated over: nothing of it has run")
