"""Layouts of topics: partitions that change while events flow, each from an offset on."""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0003"
down_revision = "0002"

# Defaults that are constants: no table is rewritten.
_ADDED = """
ALTER TABLE topic ADD COLUMN eql_layout integer NOT NULL DEFAULT 1;
ALTER TABLE consumer ADD COLUMN eql_until bigint;
CREATE TABLE topic_layout (
    eql_topic text NOT NULL,
    eql_layout integer NOT NULL,
    eql_partitions smallint NOT NULL,
    eql_after bigint NOT NULL,
    eql_created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (eql_topic, eql_layout)
);
"""

# As topics/partitioner.py has it: the hash of a key as one unsigned number of 256 bits, big end first, modulo.
_PARTITION_OF_KEY = """
CREATE FUNCTION partition_of_key(key text, partitions integer) RETURNS smallint
LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
    hash bytea := sha256(convert_to(key, 'UTF8'));
    rest bigint := 0;
BEGIN
    FOR byte IN 0..31 LOOP
        rest := (rest * 256 + get_byte(hash, byte)) % partitions;
    END LOOP;
    RETURN rest;
END
$$;
"""


def upgrade() -> None:
    for statements in (_ADDED, _PARTITION_OF_KEY):
        run(statements)
