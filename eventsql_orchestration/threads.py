"""Threads in the background. None of them keeps the process from ending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable


def start_thread(name: str, function: Callable[..., object], *arguments: object, **named: object) -> threading.Thread:
    """Start a thread that calls `function` once."""
    thread = threading.Thread(target=function, args=arguments, kwargs=named, name=f"eventsql-{name}", daemon=True)
    thread.start()
    return thread


def join_all(threads: Iterable[threading.Thread], deadline: float) -> None:
    """Wait until the threads have ended, or until `deadline`, a time of `time.monotonic`."""
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
