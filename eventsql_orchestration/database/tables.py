"""The schema as SQLAlchemy Core describes it: the tables of EventSQL 1.0.0 and what this package adds to them.

Columns of EventSQL keep their names; every added column has a default, so that its inserts go on working. The tables
carry no schema of their own: `Database` maps them to the one that is configured.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Sequence,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSON, JSONB, UUID

from eventsql_orchestration.database.queries import event_table

DROPPED: Final = "eventsql: dropped by retention"
"""The comment on a segment from before it is detached: a detached table with it may be dropped.

The function `make_segments` in the database knows it too.
"""

metadata = MetaData()

_NOW = text("now()")


def _time(name: str, *, now: bool = False) -> Column[object]:
    if now:
        return Column(name, DateTime(timezone=True), nullable=False, server_default=_NOW)
    return Column(name, DateTime(timezone=True))


topic = Table(
    "topic",
    metadata,
    Column("eql_name", Text, primary_key=True),
    Column("eql_partitions", SmallInteger, nullable=False),
    _time("eql_created_at", now=True),
    Column("eql_retention_seconds", Double),
    Column("eql_retention_bytes", BigInteger),
    Column("eql_retention_events", BigInteger),
    Column("eql_layout", Integer, nullable=False, server_default=text("1")),
)

# Of a topic whose partitions were changed while it had events: which it has after which offset.
topic_layout = Table(
    "topic_layout",
    metadata,
    Column("eql_topic", Text, primary_key=True),
    Column("eql_layout", Integer, primary_key=True, autoincrement=False),
    Column("eql_partitions", SmallInteger, nullable=False),
    Column("eql_after", BigInteger, nullable=False),
    _time("eql_created_at", now=True),
)

consumer = Table(
    "consumer",
    metadata,
    Column("eql_topic", Text, primary_key=True),
    Column("eql_name", Text, primary_key=True),
    Column("eql_partition", SmallInteger, primary_key=True, autoincrement=False),
    Column("eql_first_event_id", BigInteger),
    Column("eql_last_event_id", BigInteger),
    _time("eql_last_consumption_at"),
    Column("eql_consumed_events", BigInteger, nullable=False),
    _time("eql_created_at", now=True),
    Column("eql_paused", Boolean, nullable=False, server_default=text("false")),
    Column("eql_max_attempts", Integer, nullable=False, server_default=text("5")),
    Column("eql_epoch", BigInteger, nullable=False, server_default=text("0")),
    Column("eql_lease_owner", Text),
    _time("eql_lease_expires_at"),
    Column("eql_failed_event_id", BigInteger),
    Column("eql_attempts", Integer, nullable=False, server_default=text("0")),
    Column("eql_failure", Text),
    _time("eql_retry_at"),
    Column("eql_filter", JSON),
    Column("eql_until", BigInteger),
    Column("eql_given_up", BigInteger, nullable=False, server_default=text("0")),
)

consumer_claim = Table(
    "consumer_claim",
    metadata,
    Column("eql_id", BigInteger, Identity(always=True), primary_key=True),
    Column("eql_topic", Text, nullable=False),
    Column("eql_consumer", Text, nullable=False),
    Column("eql_partition", SmallInteger, nullable=False),
    Column("eql_after", BigInteger, nullable=False),
    Column("eql_upto", BigInteger, nullable=False),
    Column("eql_events", Integer, nullable=False),
    Column("eql_epoch", BigInteger, nullable=False),
    Column("eql_owner", Text, nullable=False),
    Column("eql_state", Text, nullable=False, server_default=text("'claimed'")),
    _time("eql_created_at", now=True),
    _time("eql_finished_at"),
)
Index(
    "consumer_claim_live",
    consumer_claim.c.eql_topic,
    consumer_claim.c.eql_consumer,
    consumer_claim.c.eql_partition,
    unique=True,
    postgresql_where=text("eql_state = 'claimed'"),
)
Index(
    "consumer_claim_range",
    consumer_claim.c.eql_topic,
    consumer_claim.c.eql_consumer,
    consumer_claim.c.eql_partition,
    consumer_claim.c.eql_upto,
)

event_buffer = Table(
    "event_buffer",
    metadata,
    Column("eql_id", BigInteger, Sequence("event_buffer_eql_id_seq"), primary_key=True),
    Column("eql_topic", Text, nullable=False),
    Column("eql_partition", SmallInteger, nullable=False),
    Column("eql_key", Text),
    Column("eql_value", LargeBinary, nullable=False),
    _time("eql_created_at", now=True),
    Column("eql_metadata", JSON, nullable=False),
)
Index("event_buffer_topic_id", event_buffer.c.eql_topic, event_buffer.c.eql_id)

event_buffer_lock = Table("event_buffer_lock", metadata, Column("eql_topic", Text, primary_key=True))

# This database's place among the shards that share its topics: at most one row.
shard = Table(
    "shard",
    metadata,
    Column("eql_name", Text, primary_key=True),
    Column("eql_set", UUID, nullable=False),
    Column("eql_active", Boolean, nullable=False, server_default=text("false")),
    _time("eql_created_at", now=True),
)
Index("shard_one", text("(true)"), unique=True, _table=shard)

# Which shards there are from which generation on; the newest one holds.
shard_layout = Table(
    "shard_layout",
    metadata,
    Column("eql_generation", Integer, primary_key=True, autoincrement=False),
    Column("eql_shards", ARRAY(Text), nullable=False),
    _time("eql_created_at", now=True),
)

# The newest offset of each topic here when a generation began: keys that moved to a shard of it have none after.
shard_fence = Table(
    "shard_fence",
    metadata,
    Column("eql_generation", Integer, primary_key=True, autoincrement=False),
    Column("eql_topic", Text, primary_key=True),
    Column("eql_fence", BigInteger, nullable=False),
)

# The roles of this installation, and what each is for: a kind, of one topic or of all.
access_role = Table(
    "access_role",
    metadata,
    Column("eql_role", Text, primary_key=True),
    Column("eql_kind", Text, nullable=False),
    Column("eql_topic", Text),
)

redriven_dead_letter = Table(
    "redriven_dead_letter",
    metadata,
    Column("eql_topic", Text, primary_key=True),
    Column("eql_letter_id", BigInteger, primary_key=True, autoincrement=False),
    _time("eql_redriven_at", now=True),
)

finished_backfill = Table(
    "finished_backfill",
    metadata,
    Column("eql_topic", Text, primary_key=True),
    Column("eql_consumer", Text, primary_key=True),
    Column("eql_id", Text, primary_key=True),
    _time("eql_finished_at", now=True),
)

# What a Spark sink has staged and what it has published: one publication for each (writer, batch).
spark_publication = Table(
    "spark_publication",
    metadata,
    Column("eql_writer", Text, primary_key=True),
    Column("eql_batch", BigInteger, primary_key=True, autoincrement=False),
    Column("eql_events", BigInteger, nullable=False),
    _time("eql_created_at", now=True),
    # The one of all that were tried for this batch which took place.
    Column("eql_id", UUID),
    # Whether records of smaller batches of this writer were deleted.
    Column("eql_oldest", Boolean, nullable=False, server_default=text("false")),
    # The streaming query that published it, and a checksum of its rows; null without one.
    Column("eql_query", Text),
    Column("eql_checksum", BigInteger),
)
spark_staged_event = Table(
    "spark_staged_event",
    metadata,
    Column("eql_attempt", UUID, primary_key=True),
    Column("eql_position", BigInteger, primary_key=True, autoincrement=False),
    Column("eql_topic", Text, nullable=False),
    Column("eql_partition", SmallInteger, nullable=False),
    Column("eql_key", Text),
    Column("eql_value", LargeBinary, nullable=False),
    Column("eql_metadata", JSON, nullable=False),
    _time("eql_created_at", now=True),
    # Of a block that is published: the row of the buffer that stands for it.
    Column("eql_buffer_id", BigInteger),
)
Index(
    "spark_staged_event_published",
    spark_staged_event.c.eql_buffer_id,
    unique=True,
    postgresql_where=text("eql_buffer_id IS NOT NULL"),
)

# Publications over several shards: on the one that decides, those that are announced and not finished; on each other
# one, its part of the events, whose blocks are kept until they are published.
spark_decision = Table(
    "spark_decision",
    metadata,
    Column("eql_id", UUID, primary_key=True),
    Column("eql_writer", Text, nullable=False),
    Column("eql_batch", BigInteger, nullable=False),
    Column("eql_shards", ARRAY(Text), nullable=False),
    Column("eql_decided", Boolean, nullable=False, server_default=text("false")),
    _time("eql_created_at", now=True),
    # Who is to decide it. Where there is one, he has an advisory lock until it is decided.
    Column("eql_owner", Text),
)
spark_part = Table(
    "spark_part",
    metadata,
    Column("eql_id", UUID, primary_key=True),
    Column("eql_shard", Text, nullable=False),
    Column("eql_writer", Text, nullable=False),
    Column("eql_batch", BigInteger, nullable=False),
    Column("eql_attempts", ARRAY(UUID), nullable=False),
    Column("eql_events", BigInteger, nullable=False),
    _time("eql_created_at", now=True),
    _time("eql_published_at"),
)
Index("spark_part_published", spark_part.c.eql_published_at)

# The three ways to use the log.
queue_message = Table(
    "queue_message",
    metadata,
    Column("eql_id", BigInteger, Identity(always=True), primary_key=True),
    Column("eql_queue", Text, nullable=False),
    Column("eql_key", Text),
    Column("eql_body", LargeBinary, nullable=False),
    Column("eql_metadata", JSON, nullable=False),
    _time("eql_created_at", now=True),
    Column("eql_visible_at", DateTime(timezone=True), nullable=False, server_default=_NOW),
    Column("eql_receives", Integer, nullable=False, server_default=text("0")),
    Column("eql_receipt", UUID),
)
Index("queue_message_visible", queue_message.c.eql_queue, queue_message.c.eql_visible_at, queue_message.c.eql_id)

aggregate = Table(
    "aggregate",
    metadata,
    Column("eql_type", Text, primary_key=True),
    Column("eql_id", Text, primary_key=True),
    Column("eql_version", BigInteger, nullable=False),
    _time("eql_created_at", now=True),
)
aggregate_change = Table(
    "aggregate_change",
    metadata,
    Column("eql_type", Text, primary_key=True),
    Column("eql_aggregate_id", Text, primary_key=True),
    Column("eql_version", BigInteger, primary_key=True, autoincrement=False),
    Column("eql_kind", Text, nullable=False),
    Column("eql_data", JSONB, nullable=False),
    _time("eql_created_at", now=True),
)
aggregate_snapshot = Table(
    "aggregate_snapshot",
    metadata,
    Column("eql_type", Text, primary_key=True),
    Column("eql_aggregate_id", Text, primary_key=True),
    Column("eql_version", BigInteger, primary_key=True, autoincrement=False),
    Column("eql_data", JSONB, nullable=False),
    _time("eql_created_at", now=True),
)

timeline_entry = Table(
    "timeline_entry",
    metadata,
    Column("eql_id", BigInteger, Identity(always=True), primary_key=True),
    Column("eql_timeline", Text, nullable=False),
    Column("eql_resource", Text, nullable=False),
    Column("eql_data", JSONB, nullable=False),
    Column("eql_occurred_at", DateTime(timezone=True), nullable=False),
)
Index("timeline_entry_resource", timeline_entry.c.eql_timeline, timeline_entry.c.eql_resource, timeline_entry.c.eql_id)

rollup_bucket = Table(
    "rollup_bucket",
    metadata,
    Column("eql_rollup", Text, primary_key=True),
    Column("eql_bucket", DateTime(timezone=True), primary_key=True),
    Column("eql_dimension", Text, primary_key=True),
    Column("eql_count", BigInteger, nullable=False),
    Column("eql_sum", BigInteger, nullable=False),
)

log_line = Table(
    "log_line",
    metadata,
    Column("eql_id", BigInteger, Identity(always=True), primary_key=True),
    Column("eql_log", Text, nullable=False),
    Column("eql_resource", Text, nullable=False),
    Column("eql_line", Text, nullable=False),
    Column("eql_written_at", DateTime(timezone=True), nullable=False),
)
Index("log_line_resource", log_line.c.eql_log, log_line.c.eql_resource, log_line.c.eql_written_at)
Index("log_line_time", log_line.c.eql_log, log_line.c.eql_written_at)


def event_log(topic_name: str, *, partitioned: bool) -> Table:
    """The table of one topic's ordered log, in a `MetaData` of its own; `topics/segments.py` makes its partitions."""
    table = Table(
        event_table(topic_name),
        MetaData(),
        Column("eql_id", BigInteger, primary_key=True, autoincrement=True),
        Column("eql_partition", SmallInteger, nullable=False),
        Column("eql_key", Text),
        Column("eql_value", LargeBinary, nullable=False),
        Column("eql_buffered_at", DateTime(timezone=True), nullable=False),
        _time("eql_created_at", now=True),
        Column("eql_metadata", JSON, nullable=False),
        postgresql_partition_by="RANGE (eql_id)",
    )
    if partitioned:
        Index(None, table.c.eql_partition, table.c.eql_id)
    return table
