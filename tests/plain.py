"""A topic's log as a plain table, as EventSQL's Java library makes it."""

from __future__ import annotations

from typing import Final

REPLACE_ORDERS: Final = """
DROP TABLE eventsql.orders_event;
CREATE TABLE eventsql.orders_event (
    eql_id bigserial PRIMARY KEY, eql_partition smallint NOT NULL, eql_key text, eql_value bytea NOT NULL,
    eql_buffered_at timestamptz NOT NULL, eql_created_at timestamptz NOT NULL DEFAULT now(), eql_metadata json NOT NULL
);
"""
"""Has the empty log of `orders` be one."""
