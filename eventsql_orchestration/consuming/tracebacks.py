"""The tracebacks of errors in the log, in the form that every log can take."""

from __future__ import annotations

import logging
import traceback
from typing import Final

from eventsql_orchestration.validation import storable

MAX_LENGTH: Final = 20_000
"""Maximum number of characters of a traceback. An error's message may quote a value of any size."""


def traceback_of(error: BaseException) -> str:
    """The traceback of an error as storable text. The middle of a long one is left out."""
    text = storable("".join(traceback.format_exception(error)))
    half = MAX_LENGTH // 2
    return text if len(text) <= MAX_LENGTH else f"{text[:half]}\n…\n{text[-half:]}"


def logger_of_errors(name: str) -> logging.Logger:
    """The logger of a module whose `exc_info` are errors of users' functions.

    Its records have the traceback as `exc_text`, and no `exc_info`: a handler that keeps records keeps no error, whose
    frames refer to events.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_with_text)
    return logger


def _with_text(record: logging.LogRecord) -> bool:
    if record.exc_info and record.exc_info[1] is not None:
        record.exc_text, record.exc_info = traceback_of(record.exc_info[1]), None
    return True
