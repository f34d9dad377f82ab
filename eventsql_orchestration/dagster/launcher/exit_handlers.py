"""Exit handlers and finalizers that a location registers when it is imported: they are the server's, not its runs'."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_OF_EACH_PROCESS: Final = ("logging", "multiprocessing.util", "weakref")
"""Modules of Python that register a handler when they are first used, and need it in each process."""


class ExitHandlers:
    """What a location wants to have done when its process ends.

    A module may delete its temporary directory, for example. The first run to end must not do that for all runs.
    """

    def __init__(self) -> None:
        self._registered: list[Callable[..., object]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record in the block: Python does not tell which handlers are registered."""
        register = atexit.register

        def record(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., Any]:
            if getattr(function, "__module__", None) not in _OF_EACH_PROCESS:
                self._registered.append(function)
            return register(function, *arguments, **options)

        atexit.register = record  # type: ignore[assignment]  # it has the same parameters
        try:
            yield
        finally:
            atexit.register = register

    def drop(self) -> None:
        """Leave them to the server. A child calls this once, after its fork."""
        for function in self._registered:
            atexit.unregister(function)
        # No public name lists them.
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001
            finalizer.atexit = False
