"""A user's function in the log of its run: its tracebacks, and the values that it returns and nothing uses.

Reports of failures have only the text of the error.
"""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass, field

from eventsql_orchestration.consuming.handlers import check_returned
from eventsql_orchestration.consuming.tracebacks import traceback_of


@dataclass(frozen=True)
class Tracebacks:
    """Logs the traceback of an error, once for each place that raises: thousands of events may fail in the same way.

    Logs a returned value that nothing uses once for each type.
    """

    log: logging.Logger
    _places: set[tuple[tuple[str, int | None], ...]] = field(default_factory=set)
    _unused: set[type] = field(default_factory=set)

    def show(self, error: BaseException) -> None:
        place = tuple((frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__))
        if place not in self._places:
            self._places.add(place)
            self.log.warning("the function raised %s:\n%s", type(error).__name__, traceback_of(error))

    def show_unused(self, returned: object, advice: str) -> None:
        """Raises `TypeError` as `check_returned`."""
        check_returned(returned)
        kind = type(returned)
        if returned is not None and kind not in self._unused:
            self._unused.add(kind)
            self.log.warning("nothing uses the %s that the function returned: %s", kind.__name__, advice)
