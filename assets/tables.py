"""The reference location's own tables, which its consumers write to: effects, beside the platform's schema."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Date, DateTime, Integer, MetaData, Table, Text, text
from sqlalchemy.schema import CreateSchema

from assets.rides.effects import CHANGES_PER_MINUTE, ORDER_TIMELINE
from assets.rides.service import DISPATCH_QUEUE
from eventsql_orchestration import Database, Shard
from eventsql_orchestration.queue import Queue
from eventsql_orchestration.views import Views

RIDES: Final = "rides"
CHURN: Final = "churn"

metadata = MetaData()

order_status = Table(
    "order_status",
    metadata,
    Column("order_id", Text, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("status", Text, nullable=False),
    Column("rider", Text, nullable=False),
    Column("driver", Text),
    Column("zone", Text, nullable=False),
    Column("price_cents", BigInteger, nullable=False),
    Column("placed_at", DateTime(timezone=True), nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False),
    schema=RIDES,
)

zone_fares = Table(
    "zone_fares",
    metadata,
    Column("zone", Text, primary_key=True),
    Column("quarter_hour", DateTime(timezone=True), primary_key=True),
    Column("orders", BigInteger, nullable=False, server_default="0"),
    Column("rides", BigInteger, nullable=False),
    Column("fares_cents", BigInteger, nullable=False),
    schema=RIDES,
)

driver_utilisation = Table(
    "driver_utilisation",
    metadata,
    Column("driver", Text, primary_key=True),
    Column("day", Date, primary_key=True),
    Column("accepted", BigInteger, nullable=False),
    Column("ended", BigInteger, nullable=False),
    Column("completed", BigInteger, nullable=False),
    Column("busy_micros", BigInteger, nullable=False, comment="the time driven where all accepted rides have ended"),
    schema=RIDES,
)

charge = Table(
    "charge",
    metadata,
    Column("order_id", Text, primary_key=True),
    Column("rider", Text, nullable=False),
    Column("price_cents", BigInteger, nullable=False),
    Column("charged_at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
    schema=RIDES,
)

directory_churn = Table(
    "directory_churn",
    metadata,
    Column("repo", Text, primary_key=True),
    Column("directory", Text, primary_key=True),
    Column("month", Text, primary_key=True),
    Column("changes", BigInteger, nullable=False),
    Column("added", BigInteger, nullable=False),
    Column("deleted", BigInteger, nullable=False),
    schema=CHURN,
)


def create(database: Database) -> None:
    """Create the tables, and the columns, that are missing."""
    with database.core() as connection:
        for schema in (RIDES, CHURN):
            connection.execute(CreateSchema(schema, if_not_exists=True))
        metadata.create_all(connection)
        # Tables of an earlier version of this location have no demand yet.
        connection.execute(
            text("ALTER TABLE rides.zone_fares ADD COLUMN IF NOT EXISTS orders bigint NOT NULL DEFAULT 0")
        )


def prepare(shard: Shard) -> None:
    """Create on a shard the tables, the views and the queue of the ride service that are missing."""
    create(shard.database)
    Queue(shard, DISPATCH_QUEUE).definition()
    Views(shard).declare(ORDER_TIMELINE, CHANGES_PER_MINUTE)
