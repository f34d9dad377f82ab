"""Publishing staged events: one transaction for each batch of a writer, once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from eventsql_orchestration.database import Connection, Queries
from eventsql_orchestration.errors import (
    ClaimLostError,
    ConfigurationError,
    EventSQLError,
    TopicNotFoundError,
)
from eventsql_orchestration.spark.options import Source
from eventsql_orchestration.spark.staging import Attempt

logger = logging.getLogger(__name__)

ORPHANED_AFTER_HOURS: Final = 24
