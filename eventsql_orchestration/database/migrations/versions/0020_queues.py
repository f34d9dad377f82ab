"""Queues with definitions: order by key, priorities, dead letters, an archive, deduplication."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0020"
down_revision = "0019"

# Messages that wait stay where they are. A receiver that holds one during the upgrade loses its receipt.
_TABLES = """
CREATE TABLE queue (
    eql_id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    eql_name text NOT NULL UNIQUE,
    eql_ordered boolean NOT NULL DEFAULT false,
    eql_visibility_timeout double precision NOT NULL DEFAULT 30,
    eql_max_receives integer,
    eql_dead_letters integer REFERENCES queue,
    eql_retention_seconds double precision,
    eql_deduplication_seconds double precision NOT NULL DEFAULT 300,
    eql_created_at timestamptz NOT NULL DEFAULT now(),
    CHECK ((eql_max_receives IS NULL) = (eql_dead_letters IS NULL))
);

LOCK TABLE queue_message IN ACCESS EXCLUSIVE MODE;
INSERT INTO queue (eql_name) SELECT DISTINCT eql_queue FROM queue_message ORDER BY eql_queue;
DROP INDEX queue_message_visible;
ALTER TABLE queue_message RENAME COLUMN eql_queue TO eql_queue_name;
ALTER TABLE queue_message
    DROP COLUMN eql_receipt,
    ADD COLUMN eql_queue integer,
    ADD COLUMN eql_priority smallint NOT NULL DEFAULT 0,
    ADD COLUMN eql_in_order boolean NOT NULL DEFAULT false,
    ADD COLUMN eql_receipt integer,
    ADD COLUMN eql_unhandled integer NOT NULL DEFAULT 0,
    ADD COLUMN eql_due_at timestamptz,
    ADD COLUMN eql_origin integer,
    ADD COLUMN eql_history jsonb;
UPDATE queue_message m SET eql_queue = q.eql_id FROM queue q WHERE q.eql_name = m.eql_queue_name;
ALTER TABLE queue_message DROP COLUMN eql_queue_name, ALTER COLUMN eql_queue SET NOT NULL;

CREATE INDEX queue_message_visible ON queue_message (eql_queue, eql_priority, eql_visible_at, eql_id);
CREATE INDEX queue_message_in_order ON queue_message (eql_queue, eql_key, eql_id) WHERE eql_in_order;
CREATE INDEX queue_message_held_in_order ON queue_message (eql_queue, eql_key)
    WHERE eql_in_order AND eql_receipt IS NOT NULL;
CREATE INDEX queue_message_parked ON queue_message (eql_queue, eql_key, eql_id)
    WHERE eql_in_order AND eql_visible_at = 'infinity';
CREATE INDEX queue_message_dead ON queue_message (eql_origin) WHERE eql_origin IS NOT NULL;

CREATE TABLE queue_deduplication (
    eql_queue integer NOT NULL,
    eql_deduplication_id text NOT NULL,
    eql_message bigint NOT NULL,
    eql_expires_at timestamptz NOT NULL,
    PRIMARY KEY (eql_queue, eql_deduplication_id)
);
CREATE INDEX queue_deduplication_expires ON queue_deduplication (eql_queue, eql_expires_at);

CREATE TABLE queue_archive (
    eql_queue integer NOT NULL,
    eql_id bigint NOT NULL,
    eql_priority smallint NOT NULL,
    eql_key text,
    eql_body bytea NOT NULL,
    eql_metadata json NOT NULL,
    eql_created_at timestamptz NOT NULL,
    eql_receives integer NOT NULL,
    eql_history jsonb,
    eql_acknowledged_at timestamptz NOT NULL,
    eql_expires_at timestamptz NOT NULL
) PARTITION BY RANGE (eql_expires_at);
CREATE INDEX queue_archive_queue ON queue_archive (eql_queue, eql_acknowledged_at);
"""

# A plan that was made while a table was empty would read the whole table later. These functions plan once in a session,
# and never a plan that reads a table without its index.
_SETTINGS = """LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off"""

_NOTE = """
CREATE FUNCTION {schema}.note_of_message(
    history jsonb, receive integer, at timestamptz, reason text
) RETURNS jsonb LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN jsonb_array_length(history) >= 20 THEN history - 0 ELSE coalesce(history, '[]') END
        || jsonb_build_array(jsonb_build_object('receive', receive, 'at', at, 'reason', reason))
$$;
"""

_PUT = """
CREATE FUNCTION {schema}.put_messages(
    of_queue integer, bodies bytea[], keys text[] DEFAULT NULL, metadata text[] DEFAULT NULL,
    priorities integer[] DEFAULT NULL, dues timestamptz[] DEFAULT NULL, delays double precision[] DEFAULT NULL,
    deduplication_ids text[] DEFAULT NULL
) RETURNS bigint[] {settings} AS $$
DECLARE
    in_order boolean;
    seconds double precision;
    ids bigint[];
    repeated boolean[];
    place integer;
    sent bigint;
BEGIN
    SELECT q.eql_ordered, q.eql_deduplication_seconds INTO in_order, seconds
    FROM {schema}.queue q WHERE q.eql_id = of_queue;
    IF in_order IS NULL THEN
        RETURN NULL;
    END IF;

    IF in_order OR deduplication_ids IS NOT NULL THEN
        ids := ARRAY(SELECT nextval('{schema}.queue_message_eql_id_seq') FROM generate_series(1, cardinality(bodies)));
    END IF;
    IF deduplication_ids IS NOT NULL THEN
        -- In full: an array that grows by an assignment begins at that place.
        repeated := array_fill(false, ARRAY[cardinality(bodies)]);
        -- In the order of the ids: of two such calls, neither then waits for the other in turn.
        FOR place IN
            SELECT given.place FROM unnest(deduplication_ids) WITH ORDINALITY AS given (id, place)
            WHERE given.id IS NOT NULL ORDER BY given.id, given.place
        LOOP
            INSERT INTO {schema}.queue_deduplication AS d
            VALUES (of_queue, deduplication_ids[place], ids[place], clock_timestamp() + make_interval(secs => seconds))
            ON CONFLICT (eql_queue, eql_deduplication_id) DO UPDATE
            SET eql_message = excluded.eql_message, eql_expires_at = excluded.eql_expires_at
            WHERE d.eql_expires_at <= clock_timestamp();
            IF NOT FOUND THEN
                repeated[place] := true;
                SELECT d.eql_message INTO sent FROM {schema}.queue_deduplication d
                WHERE d.eql_queue = of_queue AND d.eql_deduplication_id = deduplication_ids[place];
                ids[place] := sent;
            END IF;
        END LOOP;
        DELETE FROM {schema}.queue_deduplication d WHERE d.ctid = ANY (ARRAY(
            SELECT e.ctid FROM {schema}.queue_deduplication e
            WHERE e.eql_queue = of_queue AND e.eql_expires_at < now()
            ORDER BY e.eql_expires_at LIMIT 2 * cardinality(deduplication_ids) FOR UPDATE SKIP LOCKED
        ));
    END IF;

    IF ids IS NOT NULL THEN
        INSERT INTO {schema}.queue_message (
            eql_id, eql_queue, eql_key, eql_body, eql_metadata, eql_priority, eql_in_order, eql_visible_at, eql_due_at
        ) OVERRIDING SYSTEM VALUE
        SELECT g.id, of_queue, g.key, g.body, coalesce(g.metadata, '{}')::json, coalesce(g.priority, 0), g.in_order,
               -- The first message of a key that this call sends is in sight; the others wait for it.
               CASE WHEN g.in_order AND g.rank > 1 THEN 'infinity' ELSE g.due END,
               CASE WHEN g.in_order AND g.rank > 1 THEN g.due END
        FROM (
            SELECT h.id, h.key, h.body, h.metadata, h.priority, in_order AND h.key IS NOT NULL AS in_order,
                   row_number() OVER (PARTITION BY h.key ORDER BY h.id) AS rank,
                   coalesce(h.due, clock_timestamp() + make_interval(secs => coalesce(h.delay, 0))) AS due
            FROM unnest(ids, bodies, keys, metadata, priorities, dues, delays, repeated)
                AS h (id, body, key, metadata, priority, due, delay, repeated)
            WHERE h.repeated IS NOT TRUE
        ) g;
        RETURN ids;
    END IF;

    WITH inserted AS (
        INSERT INTO {schema}.queue_message (eql_queue, eql_key, eql_body, eql_metadata, eql_priority, eql_visible_at)
        SELECT of_queue, g.key, g.body, coalesce(g.metadata, '{}')::json, coalesce(g.priority, 0),
               coalesce(g.due, clock_timestamp() + make_interval(secs => coalesce(g.delay, 0)))
        FROM unnest(bodies, keys, metadata, priorities, dues, delays)
            AS g (body, key, metadata, priority, due, delay)
        RETURNING eql_id
    )
    SELECT array_agg(eql_id) INTO ids FROM inserted;
    RETURN ids;
END
$$;
"""

_TAKEN = """
RETURNS TABLE (
    id bigint, body bytea, key text, metadata text, receives integer, receipt integer, priority smallint,
    sent_at timestamptz, history jsonb
)"""

# A message whose receives are spent goes to the dead letters instead of to a receiver.
_BURY = """
CREATE FUNCTION {schema}.bury_messages(of_queue integer, to_queue integer, spent bigint[]) RETURNS void
{settings} AS $$
DECLARE
    ordered boolean;
BEGIN
    SELECT q.eql_ordered INTO ordered FROM {schema}.queue q WHERE q.eql_id = to_queue;
    UPDATE {schema}.queue_message m
    SET eql_id = DEFAULT, eql_queue = to_queue, eql_origin = of_queue, eql_receives = 0, eql_unhandled = 0,
        eql_receipt = NULL,
        eql_visible_at = clock_timestamp(), eql_due_at = NULL, eql_in_order = ordered AND m.eql_key IS NOT NULL,
        eql_history = {schema}.note_of_message(
            CASE WHEN m.eql_receipt IS NULL THEN m.eql_history ELSE {schema}.note_of_message(
                m.eql_history, m.eql_receives, m.eql_visible_at, 'the visibility timeout ended') END,
            m.eql_receives, clock_timestamp(), 'moved to the dead letters')
    WHERE m.eql_id = ANY (spent);
END
$$;
"""

_GIVE = """
        RETURN QUERY WITH given AS (
            UPDATE {schema}.queue_message m
            SET eql_visible_at = clock_timestamp() + make_interval(secs => seconds),
                eql_receives = m.eql_receives + 1,
                eql_receipt = m.eql_receives + 1,
                eql_history = CASE WHEN m.eql_receipt IS NULL THEN m.eql_history ELSE {schema}.note_of_message(
                    m.eql_history, m.eql_receives, m.eql_visible_at, 'the visibility timeout ended') END
            WHERE m.eql_id = ANY (ready)
            RETURNING m.eql_id, m.eql_body, m.eql_key, m.eql_metadata, m.eql_receives, m.eql_receipt, m.eql_priority,
                      m.eql_created_at, m.eql_history
        )
        SELECT g.eql_id, g.eql_body, g.eql_key, g.eql_metadata::text, g.eql_receives, g.eql_receipt, g.eql_priority,
               g.eql_created_at, g.eql_history
        FROM given g ORDER BY g.eql_priority DESC, g.eql_id;
"""

_TAKE = """
CREATE FUNCTION {schema}.take_messages(of_queue integer, most integer, seconds double precision) {taken}
{settings} ROWS 100 AS $$
DECLARE
    allowed integer;
    dead integer;
    ready bigint[];
    spent bigint[];
    taken integer := 0;
BEGIN
    SELECT q.eql_max_receives, q.eql_dead_letters INTO allowed, dead FROM {schema}.queue q WHERE q.eql_id = of_queue;
    LOOP
        SELECT array_agg(found.eql_id) FILTER (WHERE (found.eql_receives >= allowed) IS NOT TRUE),
               array_agg(found.eql_id) FILTER (WHERE found.eql_receives >= allowed)
        INTO ready, spent
        FROM (
            SELECT visible.eql_id, visible.eql_receives
            FROM generate_series(9, 0, -1) AS level
            CROSS JOIN LATERAL (
                SELECT m.eql_id, m.eql_receives - m.eql_unhandled AS eql_receives FROM {schema}.queue_message m
                WHERE m.eql_queue = of_queue AND m.eql_priority = level AND m.eql_visible_at <= now()
                ORDER BY m.eql_visible_at, m.eql_id LIMIT most - taken
                FOR UPDATE SKIP LOCKED
            ) visible
            LIMIT most - taken
        ) found;
        IF spent IS NOT NULL THEN
            PERFORM {schema}.bury_messages(of_queue, dead, spent);
        END IF;
        IF ready IS NOT NULL THEN
            taken := taken + cardinality(ready);
{give}
        END IF;
        EXIT WHEN spent IS NULL OR taken >= most;
    END LOOP;
END
$$;
"""

# Only the first message of a key is given out, and only while no other one of the key is held. A sender takes no lock:
# its message is visible, and the receiver that finds it decides under a lock of the key, which it only tries and keeps
# for its own short transaction. A message that cannot go yet is parked at 'infinity' if another one of its key, which
# this transaction has locked, stays in sight; the acknowledgement of that one promotes the first parked message. If
# that other one cannot be locked, the message comes back into sight a second later.
_TAKE_IN_ORDER = """
CREATE FUNCTION {schema}.take_in_order(of_queue integer, most integer, seconds double precision) {taken}
{settings} ROWS 100 AS $$
DECLARE
    allowed integer;
    dead integer;
    candidates bigint[];
    ready bigint[];
    spent bigint[];
    waiting bigint[];
    waits_for bigint[];
    witnesses bigint[];
    gone_keys text[];
    taken integer := 0;
    turns integer := 0;
    look integer;
    moment timestamptz;
BEGIN
    SELECT q.eql_max_receives, q.eql_dead_letters INTO allowed, dead FROM {schema}.queue q WHERE q.eql_id = of_queue;
    WHILE taken < most AND turns < 50 LOOP
        turns := turns + 1;
        moment := clock_timestamp();
        -- Far behind a long key, further each time.
        look := CASE WHEN turns = 1 THEN most ELSE greatest(most - taken, 100 * turns) END;
        SELECT array_agg(found.eql_id) INTO candidates
        FROM (
            SELECT visible.eql_id
            FROM generate_series(9, 0, -1) AS level
            CROSS JOIN LATERAL (
                SELECT m.eql_id FROM {schema}.queue_message m
                WHERE m.eql_queue = of_queue AND m.eql_priority = level AND m.eql_visible_at <= moment
                  AND (NOT m.eql_in_order OR pg_try_advisory_xact_lock(
                      7310035 * 4294967296 + of_queue::bigint * 1024 + (hashtext(m.eql_key) & 1023)))
                ORDER BY m.eql_visible_at, m.eql_id
                LIMIT look
                FOR UPDATE SKIP LOCKED
            ) visible
            LIMIT look
        ) found;
        EXIT WHEN candidates IS NULL;

        -- Under the locks of their keys, in a new snapshot.
        SELECT array_agg(c.eql_id) FILTER (WHERE c.first AND (c.eql_receives >= allowed) IS NOT TRUE),
               array_agg(c.eql_id) FILTER (WHERE c.first AND c.eql_receives >= allowed),
               array_agg(DISTINCT c.eql_key) FILTER (WHERE c.first AND c.eql_receives >= allowed AND c.eql_in_order),
               array_agg(c.eql_id) FILTER (WHERE NOT c.first),
               array_agg(c.witness) FILTER (WHERE NOT c.first)
        INTO ready, spent, gone_keys, waiting, waits_for
        FROM (
            SELECT m.eql_id, m.eql_key, m.eql_in_order, m.eql_receives - m.eql_unhandled AS eql_receives,
                   NOT m.eql_in_order OR (held.eql_id IS NULL AND head.eql_id = m.eql_id) AS first,
                   coalesce(held.eql_id, head.eql_id) AS witness
            FROM {schema}.queue_message m
            LEFT JOIN LATERAL (
                SELECT h.eql_id FROM {schema}.queue_message h
                WHERE m.eql_in_order AND h.eql_queue = of_queue AND h.eql_key = m.eql_key AND h.eql_in_order
                ORDER BY h.eql_id LIMIT 1
            ) head ON true
            LEFT JOIN LATERAL (
                SELECT h.eql_id FROM {schema}.queue_message h
                WHERE m.eql_in_order AND h.eql_queue = of_queue AND h.eql_key = m.eql_key AND h.eql_in_order
                  AND h.eql_receipt IS NOT NULL AND h.eql_visible_at > clock_timestamp()
                LIMIT 1
            ) held ON true
            WHERE m.eql_id = ANY (candidates)
            ORDER BY m.eql_priority DESC, m.eql_visible_at, m.eql_id
        ) c;
        ready := ready[:most - taken];

        IF spent IS NOT NULL THEN
            PERFORM {schema}.bury_messages(of_queue, dead, spent);
            PERFORM {schema}.promote_keys(of_queue, gone_keys);
        END IF;
        IF waiting IS NOT NULL THEN
            SELECT array_agg(locked.eql_id) INTO witnesses
            FROM (
                SELECT m.eql_id FROM {schema}.queue_message m
                WHERE m.eql_id = ANY (waits_for) AND m.eql_queue = of_queue FOR UPDATE SKIP LOCKED
            ) locked;
            UPDATE {schema}.queue_message m
            SET eql_visible_at = greatest(clock_timestamp(), m.eql_due_at), eql_due_at = NULL
            WHERE m.eql_id = ANY (witnesses) AND m.eql_visible_at = 'infinity';
            UPDATE {schema}.queue_message m
            SET eql_visible_at = CASE WHEN w.witness = ANY (witnesses) AND w.witness <> ALL (waiting) THEN 'infinity'
                                 ELSE clock_timestamp() + interval '1 second' END,
                eql_receipt = NULL
            FROM unnest(waiting, waits_for) AS w (id, witness)
            WHERE m.eql_id = w.id AND (spent IS NULL OR w.witness <> ALL (spent));
        END IF;
        IF ready IS NOT NULL AND ready <> '{}' THEN
            taken := taken + cardinality(ready);
{give}
        END IF;
    END LOOP;
END
$$;
"""

_PROMOTE = """
CREATE FUNCTION {schema}.promote_keys(of_queue integer, keys text[]) RETURNS void {settings} AS $$
BEGIN
    UPDATE {schema}.queue_message m
    SET eql_visible_at = greatest(clock_timestamp(), m.eql_due_at), eql_due_at = NULL
    WHERE m.eql_id = ANY (ARRAY(
        SELECT next.eql_id FROM unnest(keys) AS of_key
        CROSS JOIN LATERAL (
            SELECT n.eql_id FROM {schema}.queue_message n
            WHERE n.eql_queue = of_queue AND n.eql_key = of_key AND n.eql_in_order AND n.eql_visible_at = 'infinity'
            ORDER BY n.eql_id LIMIT 1
        ) next
    )) AND m.eql_visible_at = 'infinity';
END
$$;
"""

_ACKNOWLEDGE = """
CREATE FUNCTION {schema}.acknowledge_messages(of_queue integer, ids bigint[], receipts integer[]) RETURNS bigint[]
{settings} AS $$
DECLARE
    ordered boolean;
    retention double precision;
    done bigint[];
    keys text[];
BEGIN
    SELECT q.eql_ordered, q.eql_retention_seconds INTO ordered, retention
    FROM {schema}.queue q WHERE q.eql_id = of_queue;
    IF ordered AND current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        -- Its snapshot would miss the messages that wait behind these.
        RETURN NULL;
    END IF;
    IF retention IS NOT NULL THEN
        PERFORM {schema}.make_queue_archive(clock_timestamp() + make_interval(secs => retention));
    END IF;

    BEGIN
        IF retention IS NULL THEN
            WITH deleted AS (
                DELETE FROM {schema}.queue_message m USING unnest(ids, receipts) AS given (id, receipt)
                WHERE m.eql_id = given.id AND m.eql_receipt = given.receipt AND m.eql_queue = of_queue
                RETURNING m.eql_id, m.eql_key, m.eql_in_order
            )
            SELECT array_agg(eql_id), array_agg(DISTINCT eql_key) FILTER (WHERE eql_in_order) INTO done, keys
            FROM deleted;
        ELSE
            WITH deleted AS (
                DELETE FROM {schema}.queue_message m USING unnest(ids, receipts) AS given (id, receipt)
                WHERE m.eql_id = given.id AND m.eql_receipt = given.receipt AND m.eql_queue = of_queue
                RETURNING m.*
            ), kept AS (
                INSERT INTO {schema}.queue_archive
                SELECT d.eql_queue, d.eql_id, d.eql_priority, d.eql_key, d.eql_body, d.eql_metadata, d.eql_created_at,
                       d.eql_receives, d.eql_history, clock_timestamp(),
                       clock_timestamp() + make_interval(secs => retention)
                FROM deleted d
            )
            SELECT array_agg(eql_id), array_agg(DISTINCT eql_key) FILTER (WHERE eql_in_order) INTO done, keys
            FROM deleted;
        END IF;
        IF cardinality(done) IS DISTINCT FROM cardinality(ids) AND done IS NOT NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'EQ001';
        END IF;
    EXCEPTION WHEN SQLSTATE 'EQ001' THEN
        RETURN ARRAY(SELECT given FROM unnest(ids) AS given WHERE given <> ALL (done));
    END;
    IF done IS NULL THEN
        RETURN ids;
    END IF;
    IF ordered AND keys IS NOT NULL THEN
        -- In a new snapshot: it sees what receivers have parked behind these messages.
        PERFORM {schema}.promote_keys(of_queue, keys);
    END IF;
    RETURN '{}';
END
$$;
"""

# One partition for each day on which archived messages expire, made a day ahead.
_ARCHIVE = """
CREATE FUNCTION {schema}.make_queue_archive(expires timestamptz) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
DECLARE
    first timestamptz := date_trunc('day', expires);
    wanted timestamptz;
    name text;
BEGIN
    FOR wanted IN SELECT first + make_interval(days => ahead) FROM generate_series(0, 1) AS ahead LOOP
        name := 'queue_archive_' || to_char(wanted, 'YYYYMMDD');
        CONTINUE WHEN to_regclass(format('%I.%I', {literal}, name)) IS NOT NULL;
        IF NOT pg_try_advisory_xact_lock(7310036) THEN
            -- Somebody else is making it; only the day at hand is waited for.
            CONTINUE WHEN wanted > first;
            PERFORM pg_advisory_xact_lock(7310036);
            CONTINUE WHEN to_regclass(format('%I.%I', {literal}, name)) IS NOT NULL;
        END IF;
        -- Attaching a table waits for nobody who reads or writes the others.
        EXECUTE format('CREATE TABLE %1$I.%2$I (LIKE %1$I.queue_archive INCLUDING DEFAULTS INCLUDING INDEXES)',
                       {literal}, name);
        EXECUTE format('ALTER TABLE %1$I.queue_archive ATTACH PARTITION %1$I.%2$I FOR VALUES FROM (%3$L) TO (%4$L)',
                       {literal}, name, wanted, wanted + interval '1 day');
    END LOOP;
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.make_queue_archive(timestamptz) FROM PUBLIC;
"""

# Rights that were given by hand on the messages go on to be enough.
_KEEP_RIGHTS = """
DO $$
DECLARE
    grantee text;
BEGIN
    FOR grantee IN
        SELECT DISTINCT CASE WHEN acl.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END
        FROM pg_catalog.pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) acl
        WHERE c.oid = '{schema}.queue_message'::regclass AND acl.grantee <> c.relowner
          AND acl.privilege_type IN ('INSERT', 'UPDATE')
    LOOP
        EXECUTE 'GRANT SELECT, INSERT, UPDATE ON {schema}.queue TO ' || grantee;
        EXECUTE 'GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.queue_deduplication TO ' || grantee;
        EXECUTE 'GRANT SELECT, INSERT ON {schema}.queue_archive TO ' || grantee;
        EXECUTE 'GRANT USAGE ON SEQUENCE {schema}.queue_message_eql_id_seq TO ' || grantee;
        EXECUTE 'GRANT EXECUTE ON FUNCTION {schema}.make_queue_archive(timestamptz) TO ' || grantee;
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    name = context.config.attributes["schema"]
    run(_TABLES)
    for statements in (_NOTE, _PUT, _BURY, _PROMOTE, _TAKE, _TAKE_IN_ORDER, _ARCHIVE, _ACKNOWLEDGE, _KEEP_RIGHTS):
        text = statements.replace("{give}", _GIVE).replace("{taken}", _TAKEN).replace("{settings}", _SETTINGS)
        run(text.replace("{schema}", f'"{name}"').replace("{literal}", f"'{name}'"))
