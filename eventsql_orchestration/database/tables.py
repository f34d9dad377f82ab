"""The names of the platform's tables, and the columns that statements of SQLAlchemy Core use.

The migrations define the tables, with their keys and defaults. Columns of EventSQL 1.0.0 keep their names, and every
added column has a default, so that its inserts go on working. The descriptions carry no schema: `Database` maps them to
the configured one.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Boolean, Column, DateTime, Double, Integer, MetaData, SmallInteger, Table, Text
from sqlalchemy.dialects.postgresql import ARRAY, JSON, UUID

DROPPED: Final = "eventsql: dropped by retention"
"""The comment that a segment gets before it is detached. If the drop of such a table is interrupted, the next retention
completes it.

The function `make_segments` in the database knows it too.
"""

VERSION_TABLE: Final = "schema_version"
"""The table of the revision that the schema is at."""

NAMES: Final = (
    "topic", "topic_layout", "consumer", "consumer_claim", "redriven_dead_letter", "finished_backfill",
    "consumer_cursor", "consumer_delivery", "consumer_worker",
    "event_buffer", "event_buffer_lock", "shard", "shard_layout", "shard_fence", "access_role",
    "spark_staged_event", "spark_publication", "spark_decision", "spark_part",
    "queue", "queue_message", "queue_deduplication", "queue_archive",
    "aggregate", "aggregate_change", "archived_change", "aggregate_snapshot", "adopted_change", "store_home",
    "store_subscription", "store_dead_letter", "store_rebuild",
    "timeline_entry", "rollup_bucket", "log_line", "view_definition", "capture", "erasure",
)  # fmt: skip
"""All tables of the platform, beside the logs of topics."""

metadata = MetaData()

_TIME = DateTime(timezone=True)

topic = Table(
    "topic",
    metadata,
    Column("eql_name", Text),
    Column("eql_partitions", SmallInteger),
    Column("eql_created_at", _TIME),
    Column("eql_retention_seconds", Double),
    Column("eql_retention_bytes", BigInteger),
    Column("eql_retention_events", BigInteger),
    Column("eql_layout", Integer),
    Column("eql_storage", Text),
    Column("eql_compression", Text),
)

topic_layout = Table("topic_layout", metadata, Column("eql_topic", Text))

consumer = Table(
    "consumer",
    metadata,
    Column("eql_topic", Text),
    Column("eql_name", Text),
    Column("eql_partition", SmallInteger),
    Column("eql_last_event_id", BigInteger),
    Column("eql_last_consumption_at", _TIME),
    Column("eql_consumed_events", BigInteger),
    Column("eql_paused", Boolean),
    Column("eql_max_attempts", Integer),
    Column("eql_epoch", BigInteger),
    Column("eql_lease_owner", Text),
    Column("eql_lease_expires_at", _TIME),
    Column("eql_failed_event_id", BigInteger),
    Column("eql_attempts", Integer),
    Column("eql_failure", Text),
    Column("eql_retry_at", _TIME),
    Column("eql_filter", JSON),
    Column("eql_until", BigInteger),
)

event_buffer = Table("event_buffer", metadata, Column("eql_id", BigInteger), Column("eql_topic", Text))
event_buffer_lock = Table("event_buffer_lock", metadata, Column("eql_topic", Text))
redriven_dead_letter = Table("redriven_dead_letter", metadata, Column("eql_topic", Text))

# This database's place among the shards that share its topics: at most one row.
shard = Table("shard", metadata, Column("eql_name", Text), Column("eql_set", UUID), Column("eql_active", Boolean))

# The shards of each generation. The newest generation is in force.
shard_layout = Table("shard_layout", metadata, Column("eql_generation", Integer), Column("eql_shards", ARRAY(Text)))

# The newest offset of each topic when a generation began: keys that moved then have no event after it.
shard_fence = Table("shard_fence", metadata, Column("eql_topic", Text))

spark_staged_event = Table("spark_staged_event", metadata, Column("eql_attempt", UUID), Column("eql_topic", Text))

# The part of a publication over several shards that lies here. Its blocks are kept until they are published.
spark_part = Table("spark_part", metadata, Column("eql_attempts", ARRAY(UUID)), Column("eql_published_at", _TIME))
