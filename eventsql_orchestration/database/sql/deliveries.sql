-- register -- A process that consumes a topic as a queue; gives its number. On a logical replica, a process that has ended
-- may have had the same number: its events are free.
WITH worker AS (
    INSERT INTO {schema}.consumer_worker (eql_topic, eql_consumer, eql_name, eql_expires_at)
    VALUES (%(topic)s, %(consumer)s, %(name)s, clock_timestamp() + make_interval(secs => %(lease)s))
    RETURNING eql_id
), freed AS (
    UPDATE {schema}.consumer_delivery d SET eql_worker = NULL FROM worker w WHERE d.eql_worker = w.eql_id
)
SELECT eql_id FROM worker;

-- renew -- Prolong a process's lease, unless another process has ended it.
UPDATE {schema}.consumer_worker SET eql_expires_at = clock_timestamp() + make_interval(secs => %(lease)s)
WHERE eql_id = %(worker)s
RETURNING eql_id;

-- leave -- End a process's lease: its events are free at once.
DELETE FROM {schema}.consumer_worker WHERE eql_id = %(worker)s;

-- expire -- End the leases that were not renewed in time. A lease that is being renewed now is left alone.
DELETE FROM {schema}.consumer_worker
WHERE eql_id = ANY (ARRAY(
    SELECT eql_id FROM {schema}.consumer_worker
    WHERE eql_topic = %(topic)s AND eql_consumer = %(consumer)s AND eql_expires_at < clock_timestamp()
    FOR UPDATE SKIP LOCKED
));

-- open -- The cursor of a locked consumer partition that has none.
INSERT INTO {schema}.consumer_cursor (eql_topic, eql_consumer, eql_partition, eql_offset, eql_claimed_upto, eql_by_key)
VALUES (%(topic)s, %(consumer)s, %(partition)s, %(offset)s, %(offset)s, %(by_key)s)
RETURNING eql_id, eql_offset, eql_claimed_upto, eql_unacknowledged, eql_by_key;

-- cursor -- The cursor of a locked consumer partition.
SELECT eql_id, eql_offset, eql_claimed_upto, eql_unacknowledged, eql_by_key
FROM {schema}.consumer_cursor
WHERE eql_topic = %(topic)s AND eql_consumer = %(consumer)s AND eql_partition = %(partition)s;

-- standing -- The unacknowledged events of a partition: their number, the lowest id, how many no live process holds, how
-- many this process does not hold, the first that failed, and the seconds until the next retry is due.
SELECT count(*), min(d.eql_id), count(*) FILTER (WHERE w.eql_id IS NULL),
       count(*) FILTER (WHERE d.eql_worker = %(worker)s IS NOT TRUE), min(d.eql_id) FILTER (WHERE d.eql_attempts > 0),
       extract(epoch FROM min(d.eql_due_at) FILTER (WHERE d.eql_due_at > clock_timestamp()) - clock_timestamp())::float8
FROM {schema}.consumer_delivery d
LEFT JOIN {schema}.consumer_worker w
    ON w.eql_id = d.eql_worker AND w.eql_topic = %(topic)s AND w.eql_consumer = %(consumer)s
WHERE d.eql_cursor = %(cursor)s AND d.eql_id > %(offset)s;

-- unattended -- Consumers with partitions that are kept for events handed out, and without a live process: topic, name,
-- number of these partitions.
SELECT c.eql_topic, c.eql_name, count(*)
FROM {schema}.consumer c
WHERE c.eql_lease_owner = %(owner)s AND NOT EXISTS (
    SELECT FROM {schema}.consumer_worker w
    WHERE w.eql_topic = c.eql_topic AND w.eql_consumer = c.eql_name AND w.eql_expires_at > clock_timestamp()
)
GROUP BY c.eql_topic, c.eql_name
ORDER BY c.eql_topic, c.eql_name;

-- failed -- The attempts, the failure and the due time of a delivery.
SELECT eql_attempts, eql_failure, eql_due_at
FROM {schema}.consumer_delivery WHERE eql_cursor = %(cursor)s AND eql_id = %(id)s;

-- free -- The next events that no live process holds, which are due, and before which no event of the same key waits for
-- another process or for its retry. Events whose attempts are spent wait until somebody takes dead letters. An event up
-- to `after` that was not chosen waits, too: it may have become free since.
SELECT eql_id, eql_key FROM (
    SELECT d.eql_id, d.eql_key, ready.free,
           bool_and(
               ready.free AND (d.eql_id > %(after)s OR d.eql_id = ANY (%(chosen)s::bigint[]))
               OR d.eql_worker = %(worker)s AND w.eql_id IS NOT NULL
           ) OVER (
               PARTITION BY d.eql_key, CASE WHEN d.eql_key IS NULL THEN d.eql_id END ORDER BY d.eql_id
           ) AS clear
    FROM {schema}.consumer_delivery d
    LEFT JOIN {schema}.consumer_worker w
        ON w.eql_id = d.eql_worker AND w.eql_topic = %(topic)s AND w.eql_consumer = %(consumer)s
    CROSS JOIN LATERAL (
        SELECT w.eql_id IS NULL AND coalesce(d.eql_due_at <= clock_timestamp(), true)
               AND (%(accepts)s OR d.eql_attempts < %(max_attempts)s) AS free
    ) ready
    WHERE d.eql_cursor = %(cursor)s AND d.eql_id > %(offset)s
) waiting
WHERE free AND clear AND eql_id > %(after)s
ORDER BY eql_id
LIMIT %(limit)s;

-- lock_free -- The free events whose acknowledgement is not under way.
SELECT eql_id FROM {schema}.consumer_delivery
WHERE eql_cursor = %(cursor)s AND eql_id = ANY (%(ids)s::bigint[])
FOR UPDATE SKIP LOCKED;

-- take -- Hand locked events to a process.
UPDATE {schema}.consumer_delivery SET eql_worker = %(worker)s, eql_due_at = NULL
WHERE eql_cursor = %(cursor)s AND eql_id = ANY (%(ids)s::bigint[])
RETURNING eql_id, eql_attempts;

-- held_keys -- The keys of events that this process does not hold.
SELECT DISTINCT eql_key FROM {schema}.consumer_delivery
WHERE eql_cursor = %(cursor)s AND eql_id > %(offset)s AND eql_key IS NOT NULL AND eql_worker = %(worker)s IS NOT TRUE;

-- deliver -- Note new events as not acknowledged. Events that wait for another process's event of their key have no worker.
INSERT INTO {schema}.consumer_delivery (eql_cursor, eql_id, eql_topic, eql_key, eql_worker)
SELECT %(cursor)s, new.id, %(topic)s, new.key, new.worker
FROM unnest(%(ids)s::bigint[], %(keys)s::bigint[], %(workers)s::bigint[]) AS new (id, key, worker);

-- move_cursor -- Note where a partition's cursor stands, and what its consumer's offset is.
UPDATE {schema}.consumer_cursor
SET eql_offset = %(upto)s, eql_claimed_upto = %(claimed_upto)s, eql_unacknowledged = %(unacknowledged)s,
    eql_by_key = %(by_key)s
WHERE eql_id = %(cursor)s;

-- settle -- Move the offset of a locked consumer partition to the last id up to which every event is acknowledged. While an
-- event after it is not acknowledged, a lease without end keeps other ways of consuming away.
UPDATE {schema}.consumer
SET eql_last_event_id = %(upto)s,
    eql_first_event_id = coalesce(eql_first_event_id, %(first)s),
    eql_consumed_events = eql_consumed_events + %(consumed)s,
    eql_last_consumption_at = CASE WHEN %(consumed)s > 0 THEN clock_timestamp() ELSE eql_last_consumption_at END,
    eql_failed_event_id = %(failed)s, eql_attempts = %(attempts)s, eql_failure = %(failure)s, eql_retry_at = %(due_at)s,
    eql_epoch = eql_epoch + CASE WHEN %(held)s AND eql_lease_owner = %(owner)s IS NOT TRUE THEN 1 ELSE 0 END,
    eql_lease_owner = CASE WHEN %(held)s THEN %(owner)s END,
    eql_lease_expires_at = CASE WHEN %(held)s THEN clock_timestamp() + make_interval(secs => %(forever)s) END
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_partition = %(partition)s;

-- acknowledge -- Acknowledge events that a process holds; returns the acknowledged events. It locks their rows in the order
-- in which `hold` does, whatever the plan of the DELETE is: otherwise the two could wait for each other.
WITH held AS MATERIALIZED (
    SELECT d.eql_cursor, d.eql_id
    FROM unnest(%(cursors)s::integer[], %(ids)s::bigint[], %(workers)s::bigint[]) AS done (cursor, id, worker)
    JOIN {schema}.consumer_delivery d
        ON d.eql_cursor = done.cursor AND d.eql_id = done.id AND d.eql_worker = done.worker
    ORDER BY d.eql_cursor, d.eql_id
    FOR UPDATE OF d
)
DELETE FROM {schema}.consumer_delivery d USING held
WHERE d.eql_cursor = held.eql_cursor AND d.eql_id = held.eql_id
RETURNING d.eql_cursor, d.eql_id, d.eql_worker;

-- acknowledge_one -- Acknowledge one event that a process holds.
DELETE FROM {schema}.consumer_delivery
WHERE eql_cursor = %(cursor)s AND eql_id = %(id)s AND eql_worker = %(worker)s;

-- fail -- Give back an event whose handler failed; it is due again after a delay.
UPDATE {schema}.consumer_delivery
SET eql_worker = NULL, eql_attempts = %(attempts)s, eql_failure = %(failure)s,
    eql_due_at = clock_timestamp() + make_interval(secs => %(delay)s)
WHERE eql_cursor = %(cursor)s AND eql_id = %(id)s AND eql_worker = %(worker)s;

-- give_back -- Give back events that a process holds and whose handlers have not run.
UPDATE {schema}.consumer_delivery d
SET eql_worker = NULL
FROM unnest(%(cursors)s::integer[], %(ids)s::bigint[], %(workers)s::bigint[]) AS held (cursor, id, worker)
WHERE d.eql_cursor = held.cursor AND d.eql_id = held.id AND d.eql_worker = held.worker;

-- give_back_others -- Give back the events of a partition that a process holds, except the known deliveries. It locks their
-- rows in the order in which `hold` does.
WITH others AS MATERIALIZED (
    SELECT d.eql_cursor, d.eql_id
    FROM {schema}.consumer_cursor k JOIN {schema}.consumer_delivery d ON d.eql_cursor = k.eql_id
    WHERE k.eql_topic = %(topic)s AND k.eql_consumer = %(consumer)s AND k.eql_partition = %(partition)s
      AND d.eql_worker = %(worker)s
      AND NOT EXISTS (
          SELECT FROM unnest(%(cursors)s::integer[], %(ids)s::bigint[], %(workers)s::bigint[]) AS known (cursor, id, worker)
          WHERE known.cursor = d.eql_cursor AND known.id = d.eql_id AND known.worker = d.eql_worker
      )
    ORDER BY d.eql_cursor, d.eql_id
    FOR UPDATE OF d
)
UPDATE {schema}.consumer_delivery d SET eql_worker = NULL
FROM others
WHERE d.eql_cursor = others.eql_cursor AND d.eql_id = others.eql_id;

-- drop -- Forget events that this transaction has taken and that are not in the log any more.
DELETE FROM {schema}.consumer_delivery
WHERE eql_cursor = %(cursor)s AND eql_id = ANY (%(ids)s::bigint[]);

-- other_order -- Whether a consumer has unacknowledged events that were handed out in the other order.
SELECT EXISTS (
    SELECT FROM {schema}.consumer_cursor k
    WHERE k.eql_topic = %(topic)s AND k.eql_consumer = %(consumer)s AND k.eql_by_key <> %(by_key)s
      AND EXISTS (SELECT FROM {schema}.consumer_delivery d WHERE d.eql_cursor = k.eql_id)
);

-- resume -- Let events that failed, or that wait for a database, be due at once, with all their attempts. Events that are
-- being handled stay as they are.
WITH waiting AS MATERIALIZED (
    SELECT d.eql_cursor, d.eql_id
    FROM {schema}.consumer_cursor k JOIN {schema}.consumer_delivery d ON d.eql_cursor = k.eql_id
    WHERE k.eql_topic = %(topic)s AND k.eql_consumer = %(consumer)s
      AND (d.eql_attempts > 0 OR d.eql_due_at IS NOT NULL)
    FOR UPDATE OF d SKIP LOCKED
)
UPDATE {schema}.consumer_delivery d
SET eql_attempts = 0, eql_failure = NULL, eql_due_at = NULL
FROM waiting
WHERE d.eql_cursor = waiting.eql_cursor AND d.eql_id = waiting.eql_id;

-- hold -- Wait for the handlers that have events of partitions, and keep other processes from taking the events. It locks
-- their rows in the order in which `acknowledge` does.
SELECT FROM {schema}.consumer_cursor k JOIN {schema}.consumer_delivery d ON d.eql_cursor = k.eql_id
WHERE k.eql_topic = %(topic)s AND k.eql_consumer = %(consumer)s AND k.eql_partition = ANY (%(partitions)s)
ORDER BY d.eql_cursor, d.eql_id
FOR UPDATE OF d;

-- forget -- Forget what partitions of a consumer have handed out: their offsets are moved. Their next cursors have other
-- numbers, so no handler from before acknowledges an event that is handed out again.
WITH cursors AS (
    DELETE FROM {schema}.consumer_cursor
    WHERE eql_topic = %(topic)s AND eql_consumer = %(consumer)s AND eql_partition = ANY (%(partitions)s)
    RETURNING eql_id
)
DELETE FROM {schema}.consumer_delivery d USING cursors WHERE d.eql_cursor = cursors.eql_id;
