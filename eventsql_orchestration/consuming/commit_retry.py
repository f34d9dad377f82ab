"""What is remembered of commits that the server refused: how long the same events are tried again, then how few."""

from __future__ import annotations

import time
from typing import Final

MOST_REFUSED: Final = 20
REFUSED_SECONDS: Final = 60.0
"""So many commits in a row, over so many seconds at least, are refused for what may pass, as a conflict does, before
the event is looked for that is to blame: what has not passed by then comes from what is written."""

KEPT_BATCHES: Final = 20
"""After so many batches of a size that could be read, one of twice that size is tried: it may cost a whole timeout."""


class Refusals:
    """Those of one consumer partition, since its last commit of as many events as it takes."""

    def __init__(self) -> None:
        self._most: int | None = None
        self._of: int | None = None
        """The one event that was refused so often, None of several."""
        self._count = 0
        self._since = time.monotonic()
        self._blamed: int | None = None
        self._kept = 0
        """So many batches more are of the size that could be read."""

    def may_pass(self, event: int | None) -> bool:
        """Count a commit that was refused for what may pass; whether the same is to be tried again, later.

        `event` is the id of the one that it was of, None where it was of several. Each event that is alone is given as
        much time as several are, the first time: what others have met was not its doing.
        """
        if event is None and self._most is not None:
            # Fewer of them come first.
            return False
        if event is not None and event == self._blamed:
            return False
        now = time.monotonic()
        if event != self._of:
            self._of, self._count, self._since = event, 0, now
        self._count += 1
        if self._count < MOST_REFUSED or now - self._since < REFUSED_SECONDS:
            return True
        self._blamed = event
        return False

    def limit(self, most: int) -> int:
        """How many events, `most` of them otherwise, the next commit may be of."""
        return most if self._most is None else min(self._most, most)

    def isolate(self) -> None:
        """Events are committed one by one, and more of them again as that goes well."""
        self._most = 1

    def halve(self, most: int) -> None:
        """A batch of `most` events was too large to be read; after some smaller ones, more are read again."""
        self._most, self._kept = max(1, most // 2), KEPT_BATCHES

    def committed(self, most: int) -> bool:
        """A commit went well; whether that leaves nothing to remember."""
        if self._kept:
            self._kept -= 1
        elif self._most is not None:
            self._most *= 2
        return self._most is None or self._most >= most
