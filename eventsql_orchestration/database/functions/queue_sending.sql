-- Sending messages to queues.
--
-- A plan that was made while a table was empty would read the whole table later. These functions make a plan once in a
-- session, and never a plan that reads a table without an index.

-- For each key, whether a message was locked. ORDER BY decides which index is read, because no plan may sort: see
-- `queue_receiving.sql`.
CREATE OR REPLACE FUNCTION {schema}.lock_last_of_keys(of_queue integer, keys text[]) RETURNS boolean[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_sort = off SET jit = off AS $$
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

-- A message behind another message of its key is parked from the start: it waits out of sight, behind a message that
-- this transaction has locked. Until this transaction ends, nobody can acknowledge the locked message. Its
-- acknowledgement then sees the parked message. So only a transaction that ends at once (`alone`) takes a lock, and
-- never waits for it. Without a lock, the message is visible, and receivers decide. Nothing checks that a transaction
-- with `alone` ends at once: a sender that leaves it open delays the acknowledgement of one message of each of its keys
-- (docs/roles.md).
--
-- The function has its owner's rights, and a sender has no rights on the tables. A sender that could lock any message,
-- park messages, choose ids or write deduplication ids could lose the messages of other senders, or keep them back for
-- ever. The rules for messages are the rules of `queue.NewMessage`, and receivers rely on them.
CREATE OR REPLACE FUNCTION {schema}.put_messages(
    of_queue integer, bodies bytea[], keys text[] DEFAULT NULL, metadata text[] DEFAULT NULL,
    priorities integer[] DEFAULT NULL, dues timestamptz[] DEFAULT NULL, delays double precision[] DEFAULT NULL,
    deduplication_ids text[] DEFAULT NULL, alone boolean DEFAULT false
) RETURNS bigint[] SECURITY DEFINER LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    in_order boolean;
    seconds double precision;
    ids bigint[];
    repeated boolean[];
    behind boolean[];
    name text;
    place integer;
    sent bigint;
    own text;
    active boolean;
    elsewhere text;
BEGIN
    SELECT s.eql_name, s.eql_active INTO own, active FROM {schema}.shard s;
    SELECT q.eql_name, q.eql_ordered, q.eql_deduplication_seconds INTO name, in_order, seconds
    FROM {schema}.queue q WHERE q.eql_id = of_queue;
    IF in_order IS NULL THEN
        RETURN NULL;
    END IF;
    SELECT min(given.place) INTO place
    FROM unnest(bodies, keys, metadata, priorities, dues, delays, deduplication_ids) WITH ORDINALITY
        AS given (body, key, metadata, priority, due, delay, deduplication_id, place)
    WHERE given.body IS NULL OR octet_length(given.body) > 67108864 OR octet_length(given.key) > 65536
       OR octet_length(given.metadata) > 268435456
       OR NOT (given.priority >= 0 AND given.priority <= 9)
       OR NOT (given.due >= '0001-01-01 00:00+00' AND given.due < '10000-01-01 00:00+00')
       OR NOT (given.delay >= 0 AND given.delay <= 31536000)
       OR octet_length(given.deduplication_id) > 1024;
    IF place IS NULL AND metadata IS NOT NULL THEN
        SELECT min(given.place) INTO place
        FROM unnest(metadata) WITH ORDINALITY AS given (metadata, place)
        WHERE json_typeof(given.metadata::json) <> 'object'
           OR octet_length(given.metadata) > 2 AND EXISTS (
               SELECT FROM json_each(given.metadata::json) field
               HAVING bool_or(json_typeof(field.value) <> 'string')
                   OR count(*) <> count(DISTINCT field.key)
                   OR sum(octet_length(field.key) + octet_length(field.value #>> '{}')) > 16777216
           );
    END IF;
    IF place IS NOT NULL THEN
        RAISE EXCEPTION 'message % for queue % cannot be stored', place, quote_literal(name)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'A body is not NULL and has at most 67108864 bytes, a key has at most 65536 bytes, and a '
                         'deduplication id at most 1024 bytes. A due time is in the years 1 to 9999, a delay is 0 to '
                         '31536000 seconds, and a priority is 0 to 9. Metadata are a JSON object of strings, each name '
                         'once, with at most 16777216 bytes.';
    END IF;

    IF own IS NOT NULL THEN
        IF in_order THEN
            SELECT each.key INTO elsewhere
            FROM (SELECT l.eql_shards FROM {schema}.shard_layout l ORDER BY l.eql_generation DESC LIMIT 1) layout
            CROSS JOIN unnest(keys) AS each (key)
            WHERE own <> (
                SELECT shard FROM unnest(layout.eql_shards) AS shard
                ORDER BY sha256(convert_to(shard, 'UTF8') || decode('00', 'hex') || convert_to(each.key, 'UTF8')) DESC
                LIMIT 1
            ) AND each.key IS NOT NULL
            LIMIT 1;
        END IF;
        IF elsewhere IS NOT NULL OR NOT active THEN
            RAISE EXCEPTION 'shard % takes no message of key % for queue %',
                own, quote_nullable(elsewhere), quote_literal(name)
                USING ERRCODE = 'object_not_in_prerequisite_state',
                      CONSTRAINT = CASE WHEN active THEN 'key_of_shard' ELSE 'active_shard' END,
                      HINT = 'Send the message on the shard of its key, or finish the addition of this shard.';
        END IF;
    END IF;

    IF in_order OR deduplication_ids IS NOT NULL THEN
        ids := ARRAY(SELECT nextval('{schema}.queue_message_eql_id_seq') FROM generate_series(1, cardinality(bodies)));
    END IF;
    IF deduplication_ids IS NOT NULL THEN
        -- With all places: an array that grows by an assignment begins at the place of the assignment.
        repeated := array_fill(false, ARRAY[cardinality(bodies)]);
        -- In the order of the ids, so that two calls never wait for each other.
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
        -- The next sender of a deleted id waits until this transaction ends. So a transaction that goes on deletes only
        -- ids whose window ended a day ago.
        DELETE FROM {schema}.queue_deduplication d WHERE d.ctid = ANY (ARRAY(
            SELECT e.ctid FROM {schema}.queue_deduplication e
            WHERE e.eql_queue = of_queue
              AND e.eql_expires_at < now() - CASE WHEN alone THEN interval '0' ELSE interval '1 day' END
            ORDER BY e.eql_expires_at LIMIT 2 * cardinality(deduplication_ids) FOR UPDATE SKIP LOCKED
        ));
    END IF;

    IF ids IS NOT NULL THEN
        IF in_order AND alone AND current_setting('transaction_isolation') = 'read committed' THEN
            -- The first message of a key may be repeated, and is not sent. Then the next message asks for the key.
            behind := {schema}.lock_last_of_keys(of_queue, CASE WHEN repeated IS NULL THEN keys ELSE ARRAY(
                SELECT CASE WHEN NOT given.repeated THEN given.key END
                FROM unnest(keys, repeated) AS given (key, repeated)
            ) END);
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
REVOKE EXECUTE ON FUNCTION {schema}.put_messages(integer, bytea[], text[], text[], integer[], timestamptz[], double precision[], text[], boolean) FROM PUBLIC;

CREATE OR REPLACE FUNCTION {schema}.queue_send_all(
    queue text, bodies bytea[], keys text[] DEFAULT NULL, metadata json[] DEFAULT NULL,
    delays double precision[] DEFAULT NULL, priorities integer[] DEFAULT NULL, deduplication_ids text[] DEFAULT NULL
) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    known record;
    ids bigint[];
BEGIN
    known := {schema}.queue_number(queue);
    IF bodies IS NULL OR cardinality(bodies) > 10000
       OR cardinality(bodies) <> ANY (ARRAY[cardinality(keys), cardinality(metadata), cardinality(delays),
                                            cardinality(priorities), cardinality(deduplication_ids)]) THEN
        RAISE EXCEPTION 'bodies and the other arrays must have the same number of elements, up to 10000'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'For messages without keys, delays and so on, pass NULL.';
    END IF;

    IF cardinality(bodies) = 0 THEN
        RETURN '{}';
    END IF;
    IF deduplication_ids IS NOT NULL THEN
        -- `put_messages` finds the elements by their places, which begin at 1.
        deduplication_ids := ARRAY(SELECT unnest(deduplication_ids));
    END IF;
    IF known.in_order AND EXISTS (SELECT FROM unnest(keys) AS key WHERE octet_length(key) > 2600) THEN
        -- The index takes a longer key if PostgreSQL can compress it. Only a call with a long key pays for catching the
        -- error of the index.
        BEGIN
            ids := {schema}.put_messages(
                known.number, bodies, keys, metadata::text[], priorities, NULL, delays, deduplication_ids
            );
        EXCEPTION WHEN program_limit_exceeded THEN
            RAISE EXCEPTION 'a key is too long for the ordered queue %, which has an index of keys',
                quote_nullable(queue)
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Use keys of at most 2600 bytes. Nothing was sent.';
        END;
    ELSE
        ids := {schema}.put_messages(
            known.number, bodies, keys, metadata::text[], priorities, NULL, delays, deduplication_ids
        );
    END IF;
    IF ids IS NULL THEN
        RAISE EXCEPTION 'queue % was deleted, and nothing was sent', quote_nullable(queue)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'Create the queue with `eventsql queue create`, and send again.';
    END IF;
    RETURN ids;
END
$$;
COMMENT ON FUNCTION {schema}.queue_send_all(
    text, bytea[], text[], json[], double precision[], integer[], text[]
) IS 'Send messages to a queue in the order of the arrays, as part of this transaction. Gives their ids.';

CREATE OR REPLACE FUNCTION {schema}.queue_send(
    queue text, body bytea, key text DEFAULT NULL, metadata json DEFAULT NULL, delay double precision DEFAULT 0,
    priority integer DEFAULT 0, deduplication_id text DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    ids bigint[];
BEGIN
    -- Without deduplication ids, a queue without order takes a shorter way.
    ids := {schema}.queue_send_all(
        queue, ARRAY[body], ARRAY[key], ARRAY[metadata], ARRAY[delay], ARRAY[priority],
        CASE WHEN deduplication_id IS NOT NULL THEN ARRAY[deduplication_id] END
    );
    RETURN ids[1];
END
$$;
COMMENT ON FUNCTION {schema}.queue_send(text, bytea, text, json, double precision, integer, text) IS
    'Send one message to a queue, as part of this transaction. Gives its id.';
