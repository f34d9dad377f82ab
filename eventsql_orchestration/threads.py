"""Threads in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable


def start_thread(
    name: str, function: Callable[..., object], *arguments: object, daemon: bool = True, **named: object
) -> threading.Thread:
    """Start a thread that calls `function` once. If `daemon`, the process does not wait for it when it ends."""
    thread = threading.Thread(target=function, args=arguments, kwargs=named, name=f"eventsql-{name}", daemon=daemon)
    thread.start()
    return thread


def join_all(threads: Iterable[threading.Thread], deadline: float) -> None:
    """Wait until the threads have ended, or until `deadline`, a time of `time.monotonic`."""
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
