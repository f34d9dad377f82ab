"""Tasks that a platform on several shards repeats in a background thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from eventsql_orchestration.errors import EventSQLError
from eventsql_orchestration.forks import after_fork
from eventsql_orchestration.threads import Wake, start_thread

logger = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 0.5


class Background:
    """Calls each task every half second, until it is removed."""

    def __init__(self) -> None:
        self._after_fork()
        after_fork(self, Background._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._tasks: list[Callable[[], object]] = []
        self._stop = Wake()
        self._thread: threading.Thread | None = None

    def add(self, task: Callable[[], object]) -> None:
        """Repeat `task` from now on; adding it twice changes nothing."""
        with self._lock:
            if task not in self._tasks:
                self._tasks.append(task)
            if self._thread is None or not self._thread.is_alive():
                self._thread = start_thread("shards", self._run, self._stop)

    def remove(self, task: Callable[[], object]) -> None:
        """Stop repeating `task`."""
        with self._lock, suppress(ValueError):
            self._tasks.remove(task)

    def _run(self, stop: threading.Event) -> None:
        while not stop.wait(PAUSE_SECONDS):
            for task in list(self._tasks):
                try:
                    task()
                except EventSQLError as error:
                    logger.info("a task of the shards failed and is tried again: %s", error)
                except Exception:
                    # If the thread died, consumers would stay held back for ever.
                    logger.exception("a task of the shards failed and is tried again")

    def close(self) -> None:
        """End the thread and forget the tasks."""
        with self._lock:
            self._stop.set()
            thread, self._thread = self._thread, None
            self._tasks = []
            self._stop = Wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)
