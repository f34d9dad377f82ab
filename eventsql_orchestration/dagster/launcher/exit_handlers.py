"""Exit handlers and finalizers that a location registers when it is imported. The server runs them; its runs do not."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_OF_EACH_PROCESS: Final = ("logging", "multiprocessing.util", "weakref")
"""Modules of Python that register a handler when they are first used, and need it in each process."""


class ExitHandlers:
    """The exit handlers and finalizers of a location, to run when the server ends.

    For example, a module may delete its temporary directory at exit. The first run that ends must not delete it for all
    runs.
    """

    def __init__(self) -> None:
        self._registered: list[Callable[..., object]] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the handlers that are registered during the block: Python does not list them."""
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
        """Unregister all handlers in this process. A child calls this once, after its fork. The server keeps them."""
        for function in self._registered:
            atexit.unregister(function)
        # No public name lists the finalizers.
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # noqa: SLF001
            finalizer.atexit = False
