"""Threads in the background."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, Generic, ParamSpec, TypeVar

from eventsql_orchestration.errors import ClosedError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

SIGNAL_SECONDS: Final = 0.5
"""The longest wait of a main thread before it looks for a signal. A signal that arrives just before a wait begins does
not end the wait: Python handles the signal after it."""

logger = logging.getLogger(__name__)


class Wake(threading.Event):
    """An event for waiting threads, each of which wakes the next. Ctrl-C in the middle of `set` leaves no lock behind.

    `threading.Event` is written in Python: after an interrupt between taking its lock and the block that releases it,
    each later `set` would wait for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False
        self._tokens: SimpleQueue[None] = SimpleQueue()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        if not self._is_set:
            # Without a call in between, at whose end Ctrl-C could come: whoever sees that it is set does not set it
            # again. In this order: a thread that takes the token sees that it is set.
            self._is_set = True
            self._tokens.put(None)

    def clear(self) -> None:
        # In this order: the token of a later `set` stays.
        with suppress(Empty):
            while True:
                self._tokens.get_nowait()
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        while not self.is_set():
            try:
                self._tokens.get(timeout=timeout)
            except Empty:
                return False
            finally:
                # Wake the next thread, also after Ctrl-C. A token that `clear` left behind wakes nobody.
                if self._is_set:
                    self._tokens.put(None)
        return True


def start_thread(
    name: str, function: Callable[..., object], *arguments: object, daemon: bool = True, **named: object
) -> threading.Thread:
    """Start a thread that calls `function` once. If `daemon`, the process does not wait for it when it ends."""
    thread = threading.Thread(target=function, args=arguments, kwargs=named, name=f"eventsql-{name}", daemon=daemon)
    thread.start()
    return thread


class ThreadResult(Generic[Result]):
    """The result of a function that runs in a thread. Ctrl-C always ends a wait for it, and leaves no lock behind.

    `concurrent.futures.Future` is written in Python: after an interrupt between taking its lock and the block that
    releases it, the thread could not give its result, and would never end.
    """

    def __init__(self) -> None:
        self._ended = Wake()
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run(self, function: Callable[[], Result]) -> None:
        """Call the function. For its thread alone."""
        try:
            self._results.append(function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            self._error = error
        self._ended.set()

    def done(self) -> bool:
        """Whether the function has returned or raised an error."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done; gives False after `timeout` seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._ended.wait(max(0.0, min(SIGNAL_SECONDS, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
        return True

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result, or raise the error of the function. Raises `TimeoutError` after `timeout` seconds."""
        if not self.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._results[0]


def in_thread(name: str, function: Callable[[], Result], *, daemon: bool = True) -> ThreadResult[Result]:
    """Call `function` in a thread, and give its result when it is there.

    A process that ends, as after Ctrl-C, waits for threads of an executor, but not for this one if it is a `daemon`.
    """
    result = ThreadResult[Result]()
    start_thread(name, result.run, function, daemon=daemon)
    return result


def join_all(threads: Iterable[threading.Thread], deadline: float) -> None:
    """Wait until the threads have ended, or until `deadline`, a time of `time.monotonic`."""
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def others_alive(threads: Iterable[threading.Thread]) -> bool:
    """Whether one of the threads is alive, apart from the caller's own."""
    current = threading.current_thread()
    return any(thread.is_alive() for thread in threads if thread is not current)


def log_recovery(logger: logging.Logger, message: str, *arguments: object) -> None:
    """Log at the level INFO that a thread goes on after an error that it has logged. Commands show this record, too."""
    logger.info(message, *arguments, extra={"recovery": True}, stacklevel=2)


def after_commit(wake: Callable[Arguments, object]) -> Callable[Arguments, None]:
    """A function that calls `wake`, which wakes threads and processes, and logs its errors.

    An error must not make the commit look failed: the caller would repeat it. A thread or process that is not woken
    looks later by itself. A platform that was closed meanwhile wakes nobody.
    """

    def call(*arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        try:
            with suppress(ClosedError):
                wake(*arguments, **named)
        except Exception as error:
            logger.warning("nobody was woken after a commit: %s", error, exc_info=True)

    return call
