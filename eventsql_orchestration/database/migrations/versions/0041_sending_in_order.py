"""Sending in order: a message that comes behind another one of its key waits out of sight from the start."""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0041"
down_revision = "0040"

# Of revision 0020, where receivers moved such messages out of sight: a receive beside other receivers did so for a
# whole backlog at once, and each message was written once more.
_SETTINGS = """LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off"""

_REMEMBER_RIGHTS = """
SELECT set_config('eventsql.rights_' || p.proname, coalesce(p.proacl::text, ''), true)
FROM pg_proc p WHERE p.pronamespace = '{schema}'::regnamespace AND p.proname IN ('put_messages', 'take_in_order');
"""

# Parked behind a message that is locked: until this transaction ends, that one cannot be acknowledged, and then its
# acknowledgement sees the parked one. So only a transaction that ends at once (`alone`) locks, and it never waits for a
# lock: without one, the message is visible, and receivers decide. A lock takes rights that a role of senders lacks, and
# PostgreSQL asks for all rights of a statement: the look is a statement of its own. The bounds of the key say with the
# order which index is read: a plan made on an empty table might read the primary key's instead.
_PUT = """
DROP FUNCTION {schema}.put_messages(
    integer, bytea[], text[], text[], integer[], timestamptz[], double precision[], text[]
);
CREATE FUNCTION {schema}.put_messages(
    of_queue integer, bodies bytea[], keys text[] DEFAULT NULL, metadata text[] DEFAULT NULL,
    priorities integer[] DEFAULT NULL, dues timestamptz[] DEFAULT NULL, delays double precision[] DEFAULT NULL,
    deduplication_ids text[] DEFAULT NULL, alone boolean DEFAULT false
) RETURNS bigint[] {settings} AS $$
DECLARE
    in_order boolean;
    seconds double precision;
    ids bigint[];
    repeated boolean[];
    behind boolean[];
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
        IF in_order AND alone AND current_setting('transaction_isolation') = 'read committed'
           AND has_table_privilege('{schema}.queue_message', 'SELECT')
           AND has_any_column_privilege('{schema}.queue_message', 'UPDATE') THEN
            behind := ARRAY(
                SELECT earlier.found
                FROM (
                    SELECT g.key, g.place, row_number() OVER (PARTITION BY g.key ORDER BY g.place) AS rank
                    FROM unnest(keys) WITH ORDINALITY AS g (key, place)
                ) each
                LEFT JOIN LATERAL (
                    SELECT true AS found FROM {schema}.queue_message m
                    WHERE each.rank = 1 AND m.eql_queue = of_queue
                      AND m.eql_key >= each.key AND m.eql_key <= each.key AND m.eql_in_order
                    ORDER BY m.eql_key DESC, m.eql_id DESC LIMIT 1
                    FOR KEY SHARE SKIP LOCKED
                ) earlier ON true
                ORDER BY each.place
            );
        END IF;
        INSERT INTO {schema}.queue_message (
            eql_id, eql_queue, eql_key, eql_body, eql_metadata, eql_priority, eql_in_order, eql_visible_at, eql_due_at
        ) OVERRIDING SYSTEM VALUE
        SELECT g.id, of_queue, g.key, g.body, coalesce(g.metadata, '{}')::json, coalesce(g.priority, 0), g.in_order,
               CASE WHEN g.parked THEN 'infinity' ELSE g.due END, CASE WHEN g.parked THEN g.due END
        FROM (
            SELECT h.*, h.in_order AND (h.rank > 1 OR h.behind IS TRUE) AS parked
            FROM (
                SELECT h.id, h.key, h.body, h.metadata, h.priority, h.behind,
                       in_order AND h.key IS NOT NULL AS in_order,
                       row_number() OVER (PARTITION BY h.key ORDER BY h.id) AS rank,
                       coalesce(h.due, clock_timestamp() + make_interval(secs => coalesce(h.delay, 0))) AS due
                FROM unnest(ids, bodies, keys, metadata, priorities, dues, delays, repeated, behind)
                    AS h (id, body, key, metadata, priority, due, delay, repeated, behind)
                WHERE h.repeated IS NOT TRUE
            ) h
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

# `since` and `onwards` are those of take_messages (revision 0036). A sender's lock does not keep a receiver away.
_TAKE_IN_ORDER = """
DROP FUNCTION {schema}.take_in_order(integer, integer, double precision);
CREATE FUNCTION {schema}.take_in_order(
    of_queue integer, most integer, seconds double precision, since timestamptz DEFAULT NULL
) RETURNS TABLE (
    id bigint, body bytea, key text, metadata text, receives integer, receipt integer, priority smallint,
    sent_at timestamptz, history jsonb, onwards bytea
)
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
    earliest timestamptz := coalesce(since, '-infinity');
    first timestamptz;
    found_first timestamptz;
BEGIN
    SELECT q.eql_max_receives, q.eql_dead_letters INTO allowed, dead FROM {schema}.queue q WHERE q.eql_id = of_queue;
    WHILE taken < most AND turns < 50 LOOP
        turns := turns + 1;
        moment := clock_timestamp();
        -- Far behind a long key, further each time.
        look := CASE WHEN turns = 1 THEN most ELSE greatest(most - taken, 100 * turns) END;
        SELECT array_agg(found.eql_id), min(found.eql_visible_at) FILTER (WHERE found.level = 0)
        INTO candidates, found_first
        FROM (
            SELECT visible.eql_id, visible.eql_visible_at, level
            FROM generate_series(9, 0, -1) AS level
            CROSS JOIN LATERAL (
                SELECT m.eql_id, m.eql_visible_at FROM {schema}.queue_message m
                WHERE m.eql_queue = of_queue AND m.eql_priority = level
                  AND m.eql_visible_at >= CASE WHEN level = 0 THEN earliest ELSE '-infinity' END
                  AND m.eql_visible_at <= moment
                  AND (NOT m.eql_in_order OR pg_try_advisory_xact_lock(
                      7310035 * 4294967296 + of_queue::bigint * 1024 + (hashtext(m.eql_key) & 1023)))
                ORDER BY m.eql_visible_at, m.eql_id
                LIMIT look
                FOR NO KEY UPDATE SKIP LOCKED
            ) visible
            LIMIT look
        ) found;
        IF candidates IS NULL AND taken = 0 AND earliest > '-infinity' THEN
            earliest := '-infinity';
            CONTINUE;
        END IF;
        EXIT WHEN candidates IS NULL;
        first := least(first, found_first);

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
                WHERE m.eql_in_order AND h.eql_queue = of_queue AND h.eql_in_order
                  AND h.eql_key >= m.eql_key AND h.eql_key <= m.eql_key
                ORDER BY h.eql_key, h.eql_id LIMIT 1
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
                WHERE m.eql_id = ANY (waits_for) AND m.eql_queue = of_queue FOR NO KEY UPDATE SKIP LOCKED
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
            RETURN QUERY WITH given AS (
                UPDATE {schema}.queue_message m
                SET eql_visible_at = clock_timestamp() + make_interval(secs => seconds),
                    eql_receives = m.eql_receives + 1,
                    eql_receipt = m.eql_receives + 1,
                    eql_history = CASE WHEN m.eql_receipt IS NULL THEN m.eql_history ELSE {schema}.note_of_message(
                        m.eql_history, m.eql_receives, m.eql_visible_at, 'the visibility timeout ended') END
                WHERE m.eql_id = ANY (ready)
                RETURNING m.eql_id, m.eql_body, m.eql_key, m.eql_metadata, m.eql_receives, m.eql_receipt,
                          m.eql_priority, m.eql_created_at, m.eql_history
            )
            SELECT g.eql_id, g.eql_body, g.eql_key, g.eql_metadata::text, g.eql_receives, g.eql_receipt, g.eql_priority,
                   g.eql_created_at, g.eql_history,
                   CASE WHEN first IS NOT NULL THEN timestamptz_send(least(first, now() - interval '0.1 seconds')) END
            FROM given g ORDER BY g.eql_priority DESC, g.eql_id;
        END IF;
    END LOOP;
END
$$;
"""

_PROMOTE = """
CREATE OR REPLACE FUNCTION {schema}.promote_keys(of_queue integer, keys text[]) RETURNS void {settings} AS $$
BEGIN
    UPDATE {schema}.queue_message m
    SET eql_visible_at = greatest(clock_timestamp(), m.eql_due_at), eql_due_at = NULL
    WHERE m.eql_id = ANY (ARRAY(
        SELECT next.eql_id FROM unnest(keys) AS of_key
        CROSS JOIN LATERAL (
            SELECT n.eql_id FROM {schema}.queue_message n
            WHERE n.eql_queue = of_queue AND n.eql_key >= of_key AND n.eql_key <= of_key AND n.eql_in_order
              AND n.eql_visible_at = 'infinity'
            ORDER BY n.eql_key, n.eql_id LIMIT 1
        ) next
    )) AND m.eql_visible_at = 'infinity';
END
$$;
"""

# A function without rights of its own is everybody's.
_KEEP_RIGHTS = """
DO $$
DECLARE
    name text;
    rights text;
    grantee text;
BEGIN
    FOREACH name IN ARRAY ARRAY['put_messages', 'take_in_order'] LOOP
        rights := current_setting('eventsql.rights_' || name);
        CONTINUE WHEN rights = '';
        EXECUTE format('REVOKE EXECUTE ON FUNCTION {schema}.%I FROM PUBLIC', name);
        FOR grantee IN
            SELECT CASE WHEN acl.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(acl.grantee)) END
            FROM aclexplode(rights::aclitem[]) acl WHERE acl.privilege_type = 'EXECUTE'
        LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION {schema}.%I TO ', name) || grantee;
        END LOOP;
    END LOOP;
END
$$;
"""


def upgrade() -> None:
    schema = f'"{context.config.attributes["schema"]}"'
    for statements in (_REMEMBER_RIGHTS, _PUT, _TAKE_IN_ORDER, _PROMOTE, _KEEP_RIGHTS):
        run(statements.replace("{settings}", _SETTINGS).replace("{schema}", schema))
