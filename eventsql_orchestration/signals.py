"""Handling signals for a while."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], object] | signal.Handlers


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
