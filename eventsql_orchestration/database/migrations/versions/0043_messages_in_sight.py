"""An ordered queue has one index of the messages of a key that are in sight, and none of all of them.

A role that only sends parks its messages behind others of their key, too.
"""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0043"
down_revision = "0042"

# Each receive wrote four indexes anew, and looked for a message in two of them. A message in sight is seldom beside
# another one of its key, so a look at those in sight is short, however many are parked. Received messages come first in
# the index: whether one of them is still held is a look at them alone.
_INDEXES = """
CREATE INDEX queue_message_in_sight ON {schema}.queue_message (eql_queue, eql_key, eql_receipt, eql_id)
    WHERE eql_in_order AND eql_visible_at < 'infinity';
DROP INDEX {schema}.queue_message_in_order, {schema}.queue_message_held_in_order;
"""

_SETTINGS = """LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off"""

# For a sender, which may not read or lock messages: it tells for each key whether a message was locked. The orders say
# which index is read: a plan made on an empty table might read another one.
_LAST = """
CREATE FUNCTION {schema}.lock_last_of_keys(of_queue integer, keys text[]) RETURNS boolean[]
SECURITY DEFINER {settings} AS $$
BEGIN
    RETURN ARRAY(
        SELECT coalesce(
            (
                SELECT true FROM {schema}.queue_message m
                WHERE each.rank = 1 AND m.eql_queue = of_queue AND m.eql_key >= each.key AND m.eql_key <= each.key
                  AND m.eql_in_order AND m.eql_visible_at = 'infinity'
                ORDER BY m.eql_key DESC, m.eql_id DESC LIMIT 1
                FOR KEY SHARE SKIP LOCKED
            ),
            (
                SELECT true FROM {schema}.queue_message m
                WHERE each.rank = 1 AND m.eql_queue = of_queue AND m.eql_key >= each.key AND m.eql_key <= each.key
                  AND m.eql_in_order AND m.eql_visible_at < 'infinity'
                ORDER BY m.eql_key, m.eql_receipt LIMIT 1
                FOR KEY SHARE SKIP LOCKED
            )
        )
        FROM (
            SELECT g.key, g.place, row_number() OVER (PARTITION BY g.key ORDER BY g.place) AS rank
            FROM unnest(keys) WITH ORDINALITY AS g (key, place)
        ) each
        ORDER BY each.place
    );
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.lock_last_of_keys(integer, text[]) FROM PUBLIC;
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
        WHERE c.oid = '{schema}.queue_message'::regclass AND acl.grantee <> c.relowner AND acl.privilege_type = 'INSERT'
    LOOP
        EXECUTE 'GRANT EXECUTE ON FUNCTION {schema}.lock_last_of_keys(integer, text[]) TO ' || grantee;
    END LOOP;
END
$$;
"""

# Of revision 0041. Parked behind a message that is locked: until this transaction ends, that one cannot be
# acknowledged, and then its acknowledgement sees the parked one. So only a transaction that ends at once (`alone`)
# locks, and it never waits for a lock: without one, the message is visible, and receivers decide.
_PUT = """CREATE OR REPLACE FUNCTION {schema}.put_messages(
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
           AND has_function_privilege('{schema}.lock_last_of_keys(integer, text[])', 'EXECUTE') THEN
            behind := {schema}.lock_last_of_keys(of_queue, keys);
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

# Of revision 0041, with the new index.
_TAKE_IN_ORDER = """CREATE OR REPLACE FUNCTION {schema}.take_in_order(
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
    others bigint[];
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

        -- Under the locks of their keys, in a new snapshot. A new message is first if it is the first entry of its key:
        -- received ones would be before it, then earlier ones.
        SELECT array_agg(c.eql_id) FILTER (WHERE c.first), array_agg(c.eql_id) FILTER (WHERE NOT c.first)
        INTO ready, others
        FROM (
            SELECT m.eql_id,
                   m.eql_receives = 0 AND (NOT m.eql_in_order OR coalesce(head.eql_id = m.eql_id, false)) AS first
            FROM {schema}.queue_message m
            LEFT JOIN LATERAL (
                SELECT o.eql_id FROM {schema}.queue_message o
                WHERE m.eql_in_order AND o.eql_queue = of_queue AND o.eql_key >= m.eql_key AND o.eql_key <= m.eql_key
                  AND o.eql_in_order AND o.eql_visible_at < 'infinity'
                ORDER BY o.eql_key, o.eql_receipt, o.eql_id LIMIT 1
            ) head ON true
            WHERE m.eql_id = ANY (candidates)
            ORDER BY m.eql_priority DESC, m.eql_visible_at, m.eql_id
        ) c;

        spent := NULL;
        waiting := NULL;
        IF others IS NOT NULL THEN
            -- Each that is not first has a witness: another one that is held, an earlier one in sight, or, for one that
            -- was received before, an earlier one that is parked.
            SELECT ready || array_agg(c.eql_id)
                       FILTER (WHERE c.witness IS NULL AND (c.received >= allowed) IS NOT TRUE),
                   array_agg(c.eql_id) FILTER (WHERE c.witness IS NULL AND c.received >= allowed),
                   array_agg(DISTINCT c.eql_key)
                       FILTER (WHERE c.witness IS NULL AND c.received >= allowed AND c.eql_in_order),
                   array_agg(c.eql_id) FILTER (WHERE c.witness IS NOT NULL),
                   array_agg(c.witness) FILTER (WHERE c.witness IS NOT NULL)
            INTO ready, spent, gone_keys, waiting, waits_for
            FROM (
                SELECT m.eql_id, m.eql_key, m.eql_in_order, m.eql_receives - m.eql_unhandled AS received,
                       coalesce(taken_before.eql_id, earlier.eql_id, parked.eql_id) AS witness
                FROM {schema}.queue_message m
                LEFT JOIN LATERAL (
                    SELECT o.eql_id FROM {schema}.queue_message o
                    WHERE m.eql_in_order AND o.eql_queue = of_queue AND o.eql_key = m.eql_key
                      AND o.eql_in_order AND o.eql_visible_at < 'infinity' AND o.eql_receipt IS NOT NULL
                      AND (o.eql_visible_at > clock_timestamp() OR o.eql_id < m.eql_id)
                    ORDER BY o.eql_receipt LIMIT 1
                ) taken_before ON true
                LEFT JOIN LATERAL (
                    SELECT o.eql_id FROM {schema}.queue_message o
                    WHERE m.eql_in_order AND o.eql_queue = of_queue AND o.eql_key = m.eql_key
                      AND o.eql_in_order AND o.eql_visible_at < 'infinity' AND o.eql_receipt IS NULL
                      AND o.eql_id < m.eql_id
                    ORDER BY o.eql_receipt, o.eql_id LIMIT 1
                ) earlier ON true
                LEFT JOIN LATERAL (
                    SELECT o.eql_id FROM {schema}.queue_message o
                    WHERE m.eql_in_order AND m.eql_receives > 0 AND o.eql_queue = of_queue
                      AND o.eql_key >= m.eql_key AND o.eql_key <= m.eql_key
                      AND o.eql_in_order AND o.eql_visible_at = 'infinity'
                    ORDER BY o.eql_key, o.eql_id LIMIT 1
                ) parked ON parked.eql_id < m.eql_id
                WHERE m.eql_id = ANY (others)
                ORDER BY m.eql_priority DESC, m.eql_visible_at, m.eql_id
            ) c;
        END IF;
        IF cardinality(ready) > most - taken THEN
            -- New ones and those that come again take turns as they were found.
            ready := ARRAY(
                SELECT m.eql_id FROM {schema}.queue_message m WHERE m.eql_id = ANY (ready)
                ORDER BY m.eql_priority DESC, m.eql_visible_at, m.eql_id LIMIT most - taken
            );
        END IF;

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


def upgrade() -> None:
    schema = f'"{context.config.attributes["schema"]}"'
    for statements in (_INDEXES, _LAST, _KEEP_RIGHTS, _PUT, _TAKE_IN_ORDER):
        run(statements.replace("{settings}", _SETTINGS).replace("{schema}", schema))
