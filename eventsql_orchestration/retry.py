"""Trying something again for a while."""

from __future__ import annotations

import random
import time
from typing import Final

PAUSE: Final = (0.05, 0.25)
"""Seconds between two attempts, at least and at most: another one each time, so that of two who are in each other's way
one goes first."""


class Patience:
    """How long something is tried again: `seconds`, from now on.

    The first attempt needs none, so with 0 seconds there is one.
    """

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def lasts(self) -> bool:
        """Wait for the next attempt; False, at once, where time is up."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(left, random.uniform(*PAUSE)))  # noqa: S311 - no secret
        return True
