"""How tests wait for another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import psutil

PATIENCE: Final = 120.0
"""Seconds after which what a test waits for is taken not to happen; far more than it takes on a busy machine."""

LONGEST_PAUSE: Final = 0.05
"""Seconds between two looks at what has not happened for a while."""


def wait_until(condition: Callable[[], object], what: str = "it happens", *, seconds: float = PATIENCE) -> None:
    """Wait until a condition holds; look often at first, and less often at what takes its time."""
    deadline = time.monotonic() + seconds
    pause = LONGEST_PAUSE / 16
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(pause)
        pause = min(pause * 1.2, LONGEST_PAUSE)


def ended(process: psutil.Process) -> bool:
    """Whether a process has ended. In a container, nobody may ask for the result of one without a parent."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
