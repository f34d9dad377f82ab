"""The names of the tables that hold topics' logs. The room `storage` knows everything else about these tables."""

from __future__ import annotations

import re
import string
from typing import Final

EVENT_TABLE: Final = "%s_event"
"""The pattern of the names, which takes a topic's name in lower case."""

_FOLDED: Final = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)

BLOCK_TABLE: Final = "%s_block"
"""The pattern of the names of the tables of logs in blocks."""


ROW_STORE: Final = "%s_rows"
"""The pattern of the names of the tables with the rows of logs that have both forms. No other log has such a name."""

BLOCK_STORE: Final = "%s_array"
"""The pattern of the names of the tables with the blocks of such logs."""

_LOG: Final = re.compile(r"_(event|block|rows|array)(_|$)|_segment_")


def event_table(topic: str) -> str:
    """The name of the table that holds a topic's ordered log.

    The name is in lower case: EventSQL's Java library writes it unquoted, and PostgreSQL folds an unquoted name.
    """
    return EVENT_TABLE % topic.translate(_FOLDED)


def block_table(topic: str) -> str:
    """The name of the table that holds a topic's log in blocks."""
    return BLOCK_TABLE % topic.translate(_FOLDED)


def row_store(topic: str) -> str:
    """The name of the table that holds the rows of a topic's log in both forms."""
    return ROW_STORE % topic.translate(_FOLDED)


def block_store(topic: str) -> str:
    """The name of the table that holds the blocks of a topic's log in both forms."""
    return BLOCK_STORE % topic.translate(_FOLDED)


def holds_blocks(table: str) -> bool:
    """Whether the table of a log, by its name, holds blocks."""
    return table.endswith((BLOCK_TABLE[2:], BLOCK_STORE[2:]))


def names_log(identifier: str) -> bool:
    """Whether an identifier may be the name of a log, or of a log's segment or sequence."""
    return _LOG.search(identifier) is not None


def topic_in(message: str, schema: str) -> str | None:
    """The topic whose log in `schema` a server's message names. Words and quotes around the name differ by language."""
    found = re.search(rf"\b{re.escape(schema)}\.(\S*)_(event|block|rows|array)\W", message)
    return None if found is None else found[1]
