"""The event store has a global order, metadata, ids and versions of changes, subscriptions and projections.

No table is rewritten. Changes from before have no place of their own: `adopted_change` lists them in the order in which
they were stored. Older versions of this package append on: each new column has a default.
"""

from __future__ import annotations

from eventsql_orchestration.database.migrations import run

revision = "0017"
down_revision = "0016"

# A default that is set after its column applies to new rows only, so no row is written.
_ORDER = """
CREATE SEQUENCE aggregate_change_position AS bigint;
ALTER TABLE aggregate
    ADD COLUMN eql_transaction xid8,
    ADD COLUMN eql_closed_at timestamptz;
ALTER TABLE aggregate_change
    ADD COLUMN eql_transaction xid8,
    ADD COLUMN eql_position bigint,
    ADD COLUMN eql_schema_version integer NOT NULL DEFAULT 1,
    ADD COLUMN eql_change_id uuid,
    ADD COLUMN eql_metadata jsonb NOT NULL DEFAULT '{}';
ALTER TABLE aggregate_change
    ALTER COLUMN eql_transaction SET DEFAULT pg_current_xact_id(),
    ALTER COLUMN eql_position SET DEFAULT nextval('aggregate_change_position');
ALTER SEQUENCE aggregate_change_position OWNED BY aggregate_change.eql_position;
ALTER TABLE aggregate_snapshot ADD COLUMN eql_schema_version integer NOT NULL DEFAULT 1;
"""

# A change has the time at which its transaction began, and a transaction may wait for another one that began later.
_ADOPT = """
CREATE TABLE adopted_change (
    eql_position bigint PRIMARY KEY,
    eql_type text NOT NULL,
    eql_aggregate_id text NOT NULL,
    eql_version bigint NOT NULL,
    UNIQUE (eql_type, eql_aggregate_id, eql_version)
);
INSERT INTO adopted_change (eql_position, eql_type, eql_aggregate_id, eql_version)
SELECT row_number() OVER (ORDER BY stored.at, stored.eql_type, stored.eql_aggregate_id, stored.eql_version),
       stored.eql_type, stored.eql_aggregate_id, stored.eql_version
FROM (
    SELECT eql_type, eql_aggregate_id, eql_version,
           max(eql_created_at) OVER (PARTITION BY eql_type, eql_aggregate_id ORDER BY eql_version) AS at
    FROM aggregate_change
) stored;
CREATE UNIQUE INDEX aggregate_change_place ON aggregate_change (eql_transaction, eql_position);
CREATE UNIQUE INDEX aggregate_change_id ON aggregate_change (eql_change_id) WHERE eql_change_id IS NOT NULL;
"""

# A restored dump has this row of the server that it was taken from.
_HOME = """
CREATE TABLE store_home (
    eql_only boolean PRIMARY KEY DEFAULT true CHECK (eql_only),
    eql_server text,
    eql_era text NOT NULL
);
DO $$
DECLARE
    server text;
BEGIN
    BEGIN
        SELECT system_identifier INTO server FROM pg_control_system();
    EXCEPTION WHEN insufficient_privilege THEN
        server := NULL;
    END;
    INSERT INTO store_home (eql_server, eql_era) VALUES (server, left(gen_random_uuid()::text, 8));
END
$$;
"""

_SUBSCRIPTIONS = """
CREATE TABLE store_subscription (
    eql_name text PRIMARY KEY,
    eql_transaction xid8 NOT NULL,
    eql_position bigint NOT NULL,
    eql_types text[],
    eql_kinds text[],
    eql_handled bigint NOT NULL DEFAULT 0,
    eql_attempts integer NOT NULL DEFAULT 0,
    eql_failure text,
    eql_retry_at timestamptz,
    eql_created_at timestamptz NOT NULL DEFAULT now(),
    eql_handled_at timestamptz
);
CREATE TABLE store_dead_letter (
    eql_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    eql_subscription text NOT NULL REFERENCES store_subscription (eql_name) ON DELETE CASCADE,
    eql_type text NOT NULL,
    eql_aggregate_id text NOT NULL,
    eql_version bigint NOT NULL,
    eql_attempts integer NOT NULL,
    eql_failure text NOT NULL,
    eql_created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX store_dead_letter_subscription ON store_dead_letter (eql_subscription, eql_id);
"""


_PROJECTIONS = """
CREATE TABLE store_rebuild (
    eql_projection text PRIMARY KEY,
    eql_shadow text NOT NULL,
    eql_transaction xid8 NOT NULL,
    eql_position bigint NOT NULL,
    eql_applied bigint NOT NULL DEFAULT 0,
    eql_started_at timestamptz NOT NULL DEFAULT now()
);
"""


def upgrade() -> None:
    for statements in (_ORDER, _ADOPT, _HOME, _SUBSCRIPTIONS, _PROJECTIONS):
        run(statements)
