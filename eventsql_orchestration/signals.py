"""Handling signals for a while, and telling which signal ended a process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType
from typing import TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], object] | signal.Handlers


def ending(code: int) -> str:
    """How a process ended, by the `returncode` of `subprocess`: `was killed by SIGKILL`, `ended with exit code 1`."""
    if code < 0:
        return f"was killed by {next((each.name for each in signal.Signals if each == -code), f'signal {-code}')}"
    return f"ended with exit code {code}"


@contextmanager
def handling(handler: Handler, *signals: signal.Signals) -> Iterator[None]:
    """Handle signals in the block. An ignored SIGHUP stays ignored. Outside of the main thread, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = {number: signal.getsignal(number) for number in signals}
    for number, earlier in before.items():
        # nohup ignores SIGHUP.
        if number != signal.SIGHUP or earlier is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def setting(events: Collection[threading.Event], *signals: signal.Signals) -> Iterator[Collection[int]]:
    """Set events when one of the signals arrives in the block; gives the signals that have arrived.

    A SIGINT after any of them raises KeyboardInterrupt. Another thread sets the events: a handler runs in the main
    thread, and would wait for ever for the lock of an event that the main thread has.
    """
    arrived: set[int] = set()
    # Its `put` takes no lock that the interrupted thread may have.
    queue: SimpleQueue[bool] = SimpleQueue()

    def note(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and arrived:
            raise KeyboardInterrupt
        arrived.add(number)
        queue.put(True)

    def set_events() -> None:
        while queue.get():
            for each in events:
                each.set()

    thread = threading.Thread(target=set_events, name="eventsql-signals", daemon=True)
    thread.start()
    try:
        with handling(note, *signals):
            yield arrived
    finally:
        queue.put(False)
        thread.join()
