-- definition -- A queue with its options, or each queue if no name is given. `inserts`: whether the user may write its
-- messages by `put_plain`, which a sender may not.
SELECT
    q.eql_id, has_table_privilege('{schema}.queue_message', 'INSERT') AS inserts, q.eql_name, q.eql_ordered, q.eql_visibility_timeout, q.eql_max_receives, d.eql_name,
    q.eql_retention_seconds, q.eql_deduplication_seconds, q.eql_created_at
FROM {schema}.queue q LEFT JOIN {schema}.queue d ON d.eql_id = q.eql_dead_letters
WHERE %(name)s::text IS NULL OR q.eql_name = %(name)s
ORDER BY q.eql_name;

-- create -- A queue, unless there is one of this name; options that were not given have their defaults.
INSERT INTO {schema}.queue (eql_name, eql_ordered) VALUES (%(name)s, coalesce(%(ordered)s, false))
ON CONFLICT (eql_name) DO NOTHING;

-- configure -- Changes the options that were given.
UPDATE {schema}.queue
SET eql_visibility_timeout = coalesce(%(visibility_timeout)s, eql_visibility_timeout),
    eql_max_receives = coalesce(%(max_receives)s, eql_max_receives),
    eql_dead_letters = coalesce(
        (SELECT d.eql_id FROM {schema}.queue d WHERE d.eql_name = %(dead_letters)s), eql_dead_letters
    ),
    eql_retention_seconds = coalesce(%(retention)s, eql_retention_seconds),
    eql_deduplication_seconds = coalesce(%(deduplication_window)s, eql_deduplication_seconds)
WHERE eql_name = %(name)s;

-- put -- Writes messages, one after another; gives their ids, or NULL where there is no such queue. `alone`: the
-- transaction ends with this statement.
SELECT {schema}.put_messages(
    %(queue)s, %(bodies)s::bytea[], %(keys)s::text[], %(metadata)s::text[], %(priorities)s::int[],
    %(dues)s::timestamptz[], %(delays)s::float8[], %(deduplication_ids)s::text[], %(alone)s::bool
);

-- put_plain -- Writes messages of a queue without order, one after another; gives their ids. For one message, `put` takes
-- 1.7 times the processor time. No row where there is no such queue.
INSERT INTO {schema}.queue_message (eql_queue, eql_key, eql_body, eql_metadata, eql_priority, eql_visible_at)
SELECT q.eql_id, given.key, given.body, coalesce(given.metadata, '{{}}')::json, coalesce(given.priority, 0),
       coalesce(given.due, clock_timestamp() + make_interval(secs => coalesce(given.delay, 0)))
FROM {schema}.queue q
CROSS JOIN unnest(
    %(bodies)s::bytea[], %(keys)s::text[], %(metadata)s::text[], %(priorities)s::int[], %(dues)s::timestamptz[],
    %(delays)s::float8[]
) AS given (body, key, metadata, priority, due, delay)
WHERE q.eql_id = %(queue)s AND NOT q.eql_ordered
RETURNING eql_id;

-- take -- Receives messages of a queue without order. `since`: the column `onwards` of an earlier receive.
SELECT id, body, key, metadata, receives, receipt, priority, sent_at, history, onwards
FROM {schema}.take_messages(%(queue)s, %(max_messages)s, %(visibility_timeout)s, %(since)s::timestamptz);

-- take_in_order -- Receives the first message of each key. `since`: as for `take`.
SELECT id, body, key, metadata, receives, receipt, priority, sent_at, history, onwards
FROM {schema}.take_in_order(%(queue)s, %(max_messages)s, %(visibility_timeout)s, %(since)s::timestamptz);

-- acknowledge -- Deletes held messages, all or none; gives the ids that are not held, or NULL in an isolated transaction.
SELECT {schema}.acknowledge_messages(%(queue)s, %(ids)s::bigint[], %(receipts)s::int[]);

-- release -- Makes a held message visible after a delay, for another receiver. An earlier message of its key may be parked
-- behind it, because it came after the receive: it does not wait for the delay.
UPDATE {schema}.queue_message
SET eql_visible_at = clock_timestamp() + make_interval(secs => %(delay)s), eql_receipt = NULL,
    eql_history = CASE WHEN %(reason)s::text IS NULL THEN eql_history ELSE
        {schema}.note_of_message(eql_history, eql_receives, clock_timestamp(), %(reason)s) END
WHERE eql_id = %(id)s AND eql_queue = %(queue)s AND eql_receipt = %(receipt)s
RETURNING eql_id, CASE WHEN eql_in_order AND %(delay)s > 0 THEN {schema}.promote_keys(eql_queue, ARRAY[eql_key]) END;

-- fail -- As `release`, for a message whose handler failed. If its receives are spent, it moves to the dead letters at once: gives
-- their queue.
UPDATE {schema}.queue_message m
SET eql_visible_at = clock_timestamp() + make_interval(secs => %(delay)s), eql_receipt = NULL,
    eql_history = {schema}.note_of_message(m.eql_history, m.eql_receives, clock_timestamp(), %(reason)s)
FROM {schema}.queue q LEFT JOIN {schema}.queue d ON d.eql_id = q.eql_dead_letters
WHERE m.eql_id = %(id)s AND m.eql_queue = %(queue)s AND m.eql_receipt = %(receipt)s AND q.eql_id = m.eql_queue
RETURNING CASE WHEN q.eql_max_receives <= (m.eql_receives - m.eql_unhandled) THEN d.eql_name END,
          CASE WHEN q.eql_max_receives <= (m.eql_receives - m.eql_unhandled)
               THEN {schema}.bury_messages(m.eql_queue, d.eql_id, ARRAY[m.eql_id]) END,
          CASE WHEN m.eql_in_order
                    AND (%(delay)s > 0 OR q.eql_max_receives <= (m.eql_receives - m.eql_unhandled))
               THEN {schema}.promote_keys(m.eql_queue, ARRAY[m.eql_key]) END;

-- part held -- The messages that a receiver holds, in the order of their ids.
FROM (
    SELECT given.id, given.receipt FROM unnest(%(ids)s::bigint[], %(receipts)s::int[]) AS given (id, receipt)
    ORDER BY given.id
) held
WHERE eql_id = held.id AND eql_queue = %(queue)s AND eql_receipt = held.receipt

-- give_back -- Makes held messages visible for another receiver; their receive does not count.
UPDATE {schema}.queue_message
SET eql_unhandled = eql_unhandled + 1, eql_visible_at = clock_timestamp(), eql_receipt = NULL
{held};

-- extend -- Lets held messages stay invisible for longer; returns the messages that are held.
UPDATE {schema}.queue_message
SET eql_visible_at = clock_timestamp() + make_interval(secs => %(seconds)s)
{held}
RETURNING eql_id;

-- due -- Seconds until the next message that is not visible yet becomes visible. No row where there is no such queue.
SELECT extract(epoch FROM min(next.eql_visible_at) - clock_timestamp())::float8
FROM generate_series(0, 9) AS level
CROSS JOIN LATERAL (
    SELECT m.eql_visible_at FROM {schema}.queue_message m
    WHERE m.eql_queue = %(queue)s AND m.eql_priority = level.level
      AND m.eql_visible_at > now() AND m.eql_visible_at < 'infinity'
    ORDER BY m.eql_visible_at LIMIT 1
) next
HAVING EXISTS (SELECT FROM {schema}.queue q WHERE q.eql_id = %(queue)s);

-- part longest_wait -- The longest wait of visible messages. A worker may have given a message the time -infinity, and
-- before version 17 the server subtracts no infinite time.
clock_timestamp() - min(found.eql_visible_at) FILTER (WHERE found.eql_visible_at > '-infinity')

-- waiting -- The visible messages of a queue, counted up to a limit, and the longest wait of a message in seconds.
-- No row where there is no such queue.
SELECT count(found.eql_visible_at),
       coalesce(extract(epoch FROM {longest_wait}), 0)::float8
FROM {schema}.queue q
LEFT JOIN LATERAL (
    SELECT visible.eql_visible_at
    FROM generate_series(9, 0, -1) AS level
    CROSS JOIN LATERAL (
        SELECT m.eql_visible_at FROM {schema}.queue_message m
        WHERE m.eql_queue = q.eql_id AND m.eql_priority = level.level AND m.eql_visible_at <= now()
        ORDER BY m.eql_visible_at LIMIT %(limit)s
    ) visible
) found ON true
WHERE q.eql_name = %(name)s
GROUP BY q.eql_id;

-- part nearest of time -- A time that a worker may have written by hand. Python has no time outside of the years 1 to 9999,
-- and no infinite time: this gives the nearest time that Python has in every time zone.
greatest('0001-01-02 00:00+00', least('9999-12-31 00:00+00', {time}))

-- peek -- The messages of a queue that are first in turn, or one message, with their states.
SELECT m.eql_id, m.eql_body, m.eql_key, m.eql_metadata::text, m.eql_receives, m.eql_priority, m.eql_created_at,
       CASE WHEN m.eql_visible_at < 'infinity' THEN {nearest of m.eql_visible_at} END,
       CASE WHEN m.eql_visible_at = 'infinity' THEN 'blocked' WHEN m.eql_visible_at <= now() THEN 'visible'
            WHEN m.eql_receipt IS NULL THEN 'delayed' ELSE 'in flight' END,
       o.eql_name, m.eql_history
FROM {schema}.queue_message m LEFT JOIN {schema}.queue o ON o.eql_id = m.eql_origin
WHERE m.eql_queue = %(queue)s
ORDER BY m.eql_priority DESC, m.eql_visible_at, (m.eql_id + 0)
LIMIT %(limit)s;

-- expiry -- When a message that is acknowledged now will expire in a queue's archive, in seconds since 1970; NULL without
-- a retention.
SELECT (extract(epoch FROM now()) + eql_retention_seconds)::float8 FROM {schema}.queue WHERE eql_id = %(queue)s;

-- statistics -- The numbers of a queue's messages by state, their ages in seconds, and how many messages were sent and
-- acknowledged within the last minute. Only an archive knows acknowledged messages. By `expiry`, the planner leaves out
-- the other days of the archive: a plan for a year took 20 ms and 727 locks on PostgreSQL 15.
WITH archived AS (
    SELECT count(*) AS acknowledged, count(*) FILTER (WHERE eql_created_at > (now() - interval '1 minute')) AS sent
    FROM {schema}.queue_archive
    WHERE eql_queue = %(queue)s AND eql_acknowledged_at > (now() - interval '1 minute')
      AND eql_expires_at >= to_timestamp(%(expiry)s::float8 - 61)
      AND eql_expires_at <= to_timestamp(%(expiry)s::float8 + 1)
), dead AS (
    SELECT count(*) AS messages, count(*) FILTER (WHERE eql_created_at > (now() - interval '1 minute')) AS sent
    FROM {schema}.queue_message WHERE eql_origin = %(queue)s
)
SELECT
    count(*) FILTER (WHERE eql_visible_at <= now()),
    count(*) FILTER (WHERE eql_visible_at > now() AND eql_visible_at < 'infinity' AND eql_receipt IS NOT NULL),
    count(*) FILTER (WHERE eql_visible_at > now() AND eql_visible_at < 'infinity' AND eql_receipt IS NULL),
    count(*) FILTER (WHERE eql_visible_at = 'infinity'),
    (SELECT messages FROM dead),
    CASE WHEN count(*) > 0 THEN greatest(0, extract(epoch FROM now() - min(eql_created_at)))::float8 END,
    extract(
        epoch FROM now() - min(eql_visible_at) FILTER (WHERE eql_visible_at <= now() AND eql_visible_at > '-infinity')
    )::float8,
    count(*) FILTER (WHERE eql_created_at > (now() - interval '1 minute'))
        + (SELECT sent FROM dead) + (SELECT sent FROM archived),
    (SELECT acknowledged FROM archived)
FROM {schema}.queue_message
WHERE eql_queue = %(queue)s;

-- purge -- Deletes messages, first those that wait behind others; gives how many.
WITH purged AS (
    DELETE FROM {schema}.queue_message WHERE eql_id = ANY (ARRAY(
        SELECT eql_id FROM {schema}.queue_message
        WHERE eql_queue = %(queue)s AND eql_id <= %(upto)s
        ORDER BY eql_priority DESC, eql_visible_at DESC, (eql_id + 0) DESC LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING eql_id
)
SELECT count(*) FROM purged;

-- count_of_keys -- The messages of keys: in a queue, among its dead letters, and in its archive.
SELECT
    count(*) FILTER (WHERE m.eql_queue = %(queue)s),
    count(*) FILTER (WHERE m.eql_queue <> %(queue)s),
    (SELECT count(*) FROM {schema}.queue_archive a WHERE a.eql_queue = %(queue)s AND a.eql_key = ANY (%(keys)s::text[]))
FROM {schema}.queue_message m
WHERE (m.eql_queue = %(queue)s OR m.eql_origin = %(queue)s) AND m.eql_key = ANY (%(keys)s::text[]);

-- erase -- Deletes messages of keys in a queue and among its dead letters; gives how many of each, and their queues.
WITH erased AS (
    DELETE FROM {schema}.queue_message WHERE eql_id = ANY (ARRAY(
        SELECT eql_id FROM {schema}.queue_message
        WHERE (eql_queue = %(queue)s OR eql_origin = %(queue)s) AND eql_key = ANY (%(keys)s::text[])
        LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING eql_queue
)
SELECT count(*) FILTER (WHERE eql_queue = %(queue)s), count(*) FILTER (WHERE eql_queue <> %(queue)s),
       array_agg(DISTINCT eql_queue)
FROM erased;

-- erase_archived -- Deletes the archived messages of keys of a queue.
DELETE FROM {schema}.queue_archive WHERE eql_queue = %(queue)s AND eql_key = ANY (%(keys)s::text[]);

-- newest -- The largest id of a queue's messages.
SELECT max(eql_id) FROM {schema}.queue_message WHERE eql_queue = %(queue)s;

-- lock -- Waits for the transactions that have used queues, and keeps later ones waiting until this transaction ends.
LOCK TABLE {schema}.queue IN ACCESS EXCLUSIVE MODE;

-- may_delete -- Deletes nothing, and fails for a role that may not delete queues.
DELETE FROM {schema}.queue WHERE false;

-- holdings -- Whether a queue has messages, archived messages that have not expired, and dead letters in other queues,
-- and the queues whose dead letters it takes.
SELECT
    EXISTS (SELECT FROM {schema}.queue_message m WHERE m.eql_queue = %(queue)s),
    EXISTS (SELECT FROM {schema}.queue_archive a WHERE a.eql_queue = %(queue)s AND a.eql_expires_at > now()),
    EXISTS (SELECT FROM {schema}.queue_message m WHERE m.eql_origin = %(queue)s),
    ARRAY(SELECT o.eql_name FROM {schema}.queue o WHERE o.eql_dead_letters = %(queue)s ORDER BY o.eql_name);

-- clear_archive -- Deletes the archived messages of a queue that have expired, or all of them.
DELETE FROM {schema}.queue_archive WHERE eql_queue = %(queue)s AND (%(all)s::bool OR eql_expires_at <= now());

-- clear_deduplication -- Deletes the deduplication ids of a queue that have expired, or all of them. Skips ids that a sender
-- has locked, because the sender may wait for another id.
WITH free AS MATERIALIZED (
    SELECT eql_deduplication_id FROM {schema}.queue_deduplication
    WHERE eql_queue = %(queue)s AND (%(all)s::bool OR eql_expires_at <= now())
    FOR UPDATE SKIP LOCKED
)
DELETE FROM {schema}.queue_deduplication d USING free
WHERE d.eql_queue = %(queue)s AND d.eql_deduplication_id = free.eql_deduplication_id;

-- delete_deduplication -- Deletes the deduplication ids of a queue.
DELETE FROM {schema}.queue_deduplication WHERE eql_queue = %(queue)s;

-- delete_messages -- Deletes the messages of a queue, all at once.
DELETE FROM {schema}.queue_message WHERE eql_queue = %(queue)s;

-- delete_queue -- Deletes the definition of a queue.
DELETE FROM {schema}.queue WHERE eql_id = %(queue)s;

-- stranded -- The keys of an ordered queue that have messages behind others.
SELECT {schema}.promote_keys(%(queue)s, ARRAY(
    SELECT DISTINCT eql_key FROM {schema}.queue_message
    WHERE eql_queue = %(queue)s AND eql_in_order AND eql_visible_at = 'infinity'
));

-- dead_letters -- The messages of these ids that are dead letters of a queue.
SELECT eql_id FROM {schema}.queue_message WHERE eql_origin = %(queue)s AND eql_id = ANY (%(ids)s::bigint[]);

-- redrive -- Moves dead letters of a queue back to it, the oldest first; gives for each the ordered queue and key it left.
-- A key that is too long for the index of keys has no order there either: `bury_messages` has the same rule.
WITH chosen AS MATERIALIZED (
    SELECT eql_id, CASE WHEN eql_in_order THEN eql_queue END AS left_queue, eql_key
    FROM {schema}.queue_message
    WHERE eql_origin = %(queue)s AND (%(ids)s::bigint[] IS NULL OR eql_id = ANY (%(ids)s::bigint[]))
      AND (eql_receipt IS NULL OR eql_visible_at <= now())
      AND EXISTS (SELECT FROM {schema}.queue q WHERE q.eql_id = %(queue)s)
    ORDER BY eql_id LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
), moved AS (
    UPDATE {schema}.queue_message
    SET eql_id = DEFAULT, eql_queue = %(queue)s, eql_origin = NULL, eql_receives = 0, eql_unhandled = 0,
        eql_receipt = NULL,
        eql_visible_at = clock_timestamp(),
        eql_in_order = %(ordered)s AND eql_key IS NOT NULL AND (eql_in_order OR pg_column_size(eql_key) <= 2600),
        eql_history = {schema}.note_of_message(
            {schema}.note_of_message(eql_history, eql_receipt, eql_visible_at),
            eql_receives, clock_timestamp(), 'redriven')
    WHERE eql_id = ANY (ARRAY(SELECT eql_id FROM chosen))
)
SELECT left_queue, eql_key FROM chosen;

-- promote -- Brings the first message of each key that waits behind others into sight.
SELECT {schema}.promote_keys(%(queue)s, %(keys)s::text[]);

-- archived -- Messages that were acknowledged, the latest first.
SELECT eql_id, eql_body, eql_key, eql_metadata::text, eql_receives, eql_priority, {nearest of eql_created_at},
       {nearest of eql_acknowledged_at}
FROM {schema}.queue_archive
WHERE eql_queue = %(queue)s
ORDER BY eql_acknowledged_at DESC LIMIT %(limit)s;

-- expired_archives -- The partitions of the archive whose messages have all expired. A partition has a day of UTC.
SELECT c.relname
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = to_regclass(%(archive)s) AND NOT i.inhdetachpending
  AND c.relname ~ '^queue_archive_[0-9]+$'
  AND to_date(right(c.relname, 8), 'YYYYMMDD') + 1 < (now() AT TIME ZONE 'UTC')
ORDER BY c.relname;

-- may_read_lag -- Whether this role may read the state of messages, beside that of queues.
SELECT has_table_privilege('{schema}.queue', 'SELECT')
    AND has_column_privilege('{schema}.queue_message', 'eql_visible_at', 'SELECT');

-- lag -- The messages of each queue by state, each counted up to a limit; the longest wait of a visible message in
-- seconds; whether the queue takes the dead letters of another queue; the queue of its dead letters. Reads as many
-- entries of indexes as it counts.
SELECT q.eql_name, least(visible.messages, %(limit)s), least(hidden.held, %(limit)s), least(hidden.delayed, %(limit)s),
       blocked.messages, dead.messages, greatest(0, coalesce(visible.seconds, 0)),
       EXISTS (SELECT FROM {schema}.queue o WHERE o.eql_dead_letters = q.eql_id),
       (SELECT d.eql_name FROM {schema}.queue d WHERE d.eql_id = q.eql_dead_letters)
FROM {schema}.queue q
CROSS JOIN LATERAL (
    SELECT count(*) AS messages, extract(epoch FROM {longest_wait})::float8 AS seconds
    FROM generate_series(0, 9) AS level
    CROSS JOIN LATERAL (
        SELECT m.eql_visible_at FROM {schema}.queue_message m
        WHERE m.eql_queue = q.eql_id AND m.eql_priority = level.level AND m.eql_visible_at <= now()
        ORDER BY m.eql_visible_at LIMIT %(limit)s
    ) found
) visible
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE found.eql_receipt IS NOT NULL) AS held,
           count(*) FILTER (WHERE found.eql_receipt IS NULL) AS delayed
    FROM generate_series(0, 9) AS level
    CROSS JOIN LATERAL (
        SELECT m.eql_receipt FROM {schema}.queue_message m
        WHERE m.eql_queue = q.eql_id AND m.eql_priority = level.level
          AND m.eql_visible_at > now() AND m.eql_visible_at < 'infinity'
        ORDER BY m.eql_visible_at LIMIT %(limit)s
    ) found
) hidden
CROSS JOIN LATERAL (
    SELECT count(*) AS messages FROM (
        SELECT FROM {schema}.queue_message m
        WHERE m.eql_queue = q.eql_id AND m.eql_in_order AND m.eql_visible_at = 'infinity' LIMIT %(limit)s
    ) found
) blocked
CROSS JOIN LATERAL (
    SELECT count(*) AS messages FROM (
        SELECT FROM {schema}.queue_message m WHERE m.eql_origin = q.eql_id LIMIT %(limit)s
    ) found
) dead
ORDER BY q.eql_name;
