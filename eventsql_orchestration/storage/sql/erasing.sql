-- part erased -- Whether an event was erased: its value is empty, and its metadata begins with the mark.
(octet_length(eql_value) = 0 AND starts_with(eql_metadata::text, '{{"eventsql_erased":'))

-- part clear -- Whether nothing of an event is left to erase. A handler may have copied an erased event with metadata of its
-- own. The message of a dead letter that was made of an erased event says only that.
({erased} AND NOT EXISTS (
    SELECT FROM json_object_keys({schema}.readable_metadata(eql_metadata)) AS name
    WHERE name <> ALL (ARRAY['eventsql_erased', 'dlt_message'] || %(kept)s::text[])
))

-- part marked -- The metadata of an event once it is erased: the mark, and the names of a dead letter that are `kept`.
-- Another program may have written any JSON.
(%(mark)s::text || CASE WHEN cardinality(%(kept)s::text[]) > 0 THEN coalesce((
    SELECT string_agg(',' || to_json(each.key)::text || ':' || each.value::text, '')
    FROM json_each({schema}.readable_metadata(eql_metadata)) AS each WHERE each.key = ANY (%(kept)s::text[])
), '') ELSE '' END || '}}')::json

-- part wanted -- Whether an event is to be erased; with `copies` only events that were redriven.
(eql_key = ANY (%(keys)s::text[]) AND (NOT %(copies)s OR strpos(eql_metadata::text, '"redriven_from"') > 0)
    AND {clear} IS NOT TRUE)

-- part window -- The events to erase in a range of ids.
eql_id > %(after)s AND eql_id <= %(upto)s AND {wanted}

-- part by_key -- How many events of each key a statement found.
SELECT eql_key, count(*) FROM found GROUP BY eql_key

-- count -- How many events of each key a range of a log has that are not erased.
WITH found AS (SELECT eql_key FROM {schema}.{row_store} WHERE {window})
{by_key};

-- erase -- Erase the events of keys in a range of a log; how many of each key. A second call finds none.
WITH found AS (
    UPDATE {schema}.{row_store} SET eql_value = '', eql_metadata = {marked} WHERE {window}
    RETURNING eql_key
)
{by_key};

-- ends -- The first id of a log's table after an id, and the last; NULL without events.
SELECT min(eql_id), max(eql_id) FROM {schema}.{log_table} WHERE eql_id > %(after)s;

-- part buffered -- The events to erase in a range of the buffer. The row of a block has no key.
(eql_topic, eql_id) > (%(topic)s, %(after)s) AND (eql_topic, eql_id) <= (%(topic)s, %(upto)s) AND {wanted}

-- count_buffered -- How many events of each key a range of the buffer has that are not erased.
WITH found AS (SELECT eql_key FROM {schema}.event_buffer WHERE {buffered})
{by_key};

-- erase_buffered -- Erase the events of keys in a range of the buffer; how many of each key.
WITH found AS (
    UPDATE {schema}.event_buffer SET eql_value = '', eql_metadata = {marked} WHERE {buffered}
    RETURNING eql_key
)
{by_key};

-- buffered_end -- The buffer id that ends the next range of at most `limit` events of a topic; NULL without events.
SELECT max(eql_id) FROM (
    SELECT eql_id FROM {schema}.event_buffer
    WHERE (eql_topic, eql_id) > (%(topic)s, %(after)s) AND (eql_topic, eql_id) <= (%(topic)s, 9223372036854775807)
    ORDER BY eql_topic, eql_id
    LIMIT %(limit)s
) next;

-- try_change -- Keep other programs from changing stored events of a topic until the transaction ends; false if one does
-- so now.
SELECT pg_try_advisory_xact_lock(hashtextextended(%(topic)s, 6074603));

-- copy_events -- Read and copy events of a topic, or of its dead letters, in this transaction. An erasure waits for its
-- end before it looks for copies.
SELECT pg_advisory_xact_lock_shared(hashtextextended(%(topic)s, 6074604));

-- await_copies -- Wait until the transactions that copy events of the topic have ended.
SELECT pg_advisory_xact_lock(hashtextextended(%(topic)s, 6074604));

-- failing -- The partitions of a topic's consumers with a failed event: name, partition, offset of the event.
SELECT eql_name, eql_partition, eql_failed_event_id FROM {schema}.consumer
WHERE eql_topic = %(topic)s AND eql_failed_event_id IS NOT NULL AND eql_failure <> %(failure)s;

-- replace_failure -- Replace the text of a failure, which may quote the event.
UPDATE {schema}.consumer SET eql_failure = %(failure)s
WHERE eql_topic = %(topic)s AND eql_name = %(consumer)s AND eql_partition = %(partition)s AND eql_failed_event_id = %(event)s;

-- failed_deliveries -- The failed events of a topic that is consumed as a queue: offsets.
SELECT DISTINCT eql_id FROM {schema}.consumer_delivery
WHERE eql_topic = %(topic)s AND eql_failure <> %(failure)s
ORDER BY eql_id;

-- replace_failures_of_deliveries -- Replace the texts of failures of events. A consumer's row gets its text from them.
UPDATE {schema}.consumer_delivery SET eql_failure = %(failure)s
WHERE eql_topic = %(topic)s AND eql_id = ANY (%(events)s::bigint[]) AND eql_failure <> %(failure)s;

-- analyzed -- Which tables have statistics of the rows of all their partitions: somebody has analyzed them by hand.
SELECT DISTINCT tablename::text FROM pg_stats
WHERE schemaname = %(schema)s AND tablename = ANY (%(tables)s::text[]) AND inherited;

-- changed -- A transaction that is later than all changes so far.
SELECT pg_current_xact_id()::xid::text;

-- is_seen -- Whether an open transaction, or a replica, may see rows as they were before a transaction.
SELECT coalesce(max(age(held.xid)) > age(%(changed)s::xid), false)
FROM (
    SELECT unnest(ARRAY[backend_xid, backend_xmin]) AS xid FROM pg_stat_activity
    WHERE pid = pg_backend_pid() IS NOT TRUE AND coalesce(datname = current_database(), true)
      AND backend_type = 'autovacuum worker' IS NOT TRUE
    UNION ALL
    SELECT transaction FROM pg_prepared_xacts WHERE database = current_database()
    UNION ALL
    SELECT xmin FROM pg_replication_slots
) held;
