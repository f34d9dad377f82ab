"""Stages blocks of events as Spark's tasks do."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from psycopg import sql

from eventsql_orchestration import EventSQL, Publication
from eventsql_orchestration.publishing import copy_format
from eventsql_orchestration.publishing.block_format import STAGED_COLUMNS, encode_blocks


def stage_blocks(platform: EventSQL, *blocks: Sequence[Publication]) -> uuid.UUID:
    """Stage blocks of events of one topic, in partition 0; gives their attempt."""
    attempt, position = uuid.uuid4(), 0
    columns = sql.SQL(", ").join(map(sql.Identifier, STAGED_COLUMNS))
    statement = sql.SQL("COPY eventsql.spark_staged_event ({}) FROM STDIN (FORMAT binary)").format(columns)
    with platform.database.connection() as connection, connection.cursor().copy(statement) as copy:
        copy.write(copy_format.HEADER)
        for publications in blocks:
            (block,) = encode_blocks(publications, [0] * len(publications))
            copy.write(block.staged_row(attempt, position, publications[0].topic))
            position += block.events
        copy.write(copy_format.TRAILER)
    return attempt
