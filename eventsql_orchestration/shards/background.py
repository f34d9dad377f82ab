"""What a platform on shards looks after from a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from eventsql_orchestration.errors import EventSQLError

logger = logging.getLogger(__name__)

CHORE_SECONDS: Final = 0.5


class Chores:
    """Calls functions again and again, while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chores: list[Callable[[], object]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def attend(self, chore: Callable[[], object]) -> None:
        """Call `chore` from now on; one that is called already is called no more often."""
        with self._lock:
            if chore not in self._chores:
                self._chores.append(chore)
            # A process that was forked since has no such thread.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="eventsql-shards", daemon=True
                )
                self._thread.start()

    def neglect(self, chore: Callable[[], object]) -> None:
        """Call it no more."""
        with self._lock, suppress(ValueError):
            self._chores.remove(chore)

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(CHORE_SECONDS):
            for chore in list(self._chores):
                try:
                    chore()
                except EventSQLError as error:
                    logger.info("tried again in a moment: %s", error)
                except Exception:
                    # A thread that dies would leave consumers held back for ever.
                    logger.exception("tried again in a moment")

    def close(self) -> None:
        """End the thread and forget what it was to do."""
        with self._lock:
            self._stop.set()
            thread, self._thread = self._thread, None
            self._chores = []
            self._stop = threading.Event()
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
