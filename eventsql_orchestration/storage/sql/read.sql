-- parts of times

-- part value -- The value of an event; NULL for an erased one, whose metadata begin with a mark.
CASE WHEN octet_length(eql_value) > 0 OR NOT starts_with(eql_metadata::text, '{{"eventsql_erased":') THEN eql_value END

-- read -- Events of a range of offsets, in order, up to the event that makes `bytes` full. The statements for one
-- partition are planned for their values: a generic plan would walk over the events of all other partitions, and reach
-- no end if the partition gets no event. A topic that EventSQL's Java library registered after the migrations has times
-- without a time zone.
SELECT eql_id, eql_partition, eql_key, {value}, eql_buffered_at::timestamptz, eql_created_at::timestamptz, eql_metadata
FROM (
    SELECT *, sum(octet_length(eql_value)) OVER (ORDER BY eql_id ROWS UNBOUNDED PRECEDING) AS filled
    FROM (
        SELECT * FROM {schema}.{event_table}
        WHERE {in_partition} eql_id > %(after)s AND eql_id <= %(upto)s
        ORDER BY eql_id
        LIMIT %(limit)s
    ) next
) event
WHERE filled - octet_length(eql_value) < %(bytes)s::bigint
ORDER BY eql_id;

-- is_refused -- Whether there is a log that the current role may not read.
SELECT has_table_privilege(to_regclass(%(log)s), 'SELECT') IS FALSE;

-- check_readable -- Read no row of a topic's log. The statement fails without the right to read the log.
SELECT FROM {schema}.{log_table} LIMIT 0;

-- end -- The newest offset of a topic, 0 when it is empty.
SELECT coalesce(max(eql_id), 0) FROM {schema}.{log_table};

-- end_partition -- The newest offset of one partition, 0 when it is empty.
SELECT coalesce(max(eql_id), 0) FROM {schema}.{log_table} WHERE eql_partition = %(partition)s;

-- count -- How many events a range of offsets holds.
SELECT count(*) FROM {schema}.{event_table} WHERE {in_partition} eql_id > %(after)s AND eql_id <= %(upto)s;

-- extent -- How many events a range of offsets holds, and the first of them.
SELECT count(*), min(eql_id) FROM {schema}.{event_table} WHERE {in_partition} eql_id > %(after)s AND eql_id <= %(upto)s;

-- waiting -- Of the events of a range, at most `most`: number, last offset, seconds since the first was moved.
SELECT count(*), max(eql_id), extract(epoch FROM clock_timestamp() - min(eql_created_at))::float8
FROM (
    SELECT eql_id, eql_created_at FROM {schema}.{event_table}
    WHERE {in_partition} eql_id > %(after)s AND eql_id <= %(upto)s
    ORDER BY eql_id
    LIMIT %(most)s
) next;

-- oldest -- Seconds since the first event after an offset was published.
SELECT {seconds_since of eql_buffered_at}
FROM {schema}.{event_table}
WHERE {in_partition} eql_id > %(after)s
ORDER BY eql_id
LIMIT 1;

-- bounds -- The ids of the oldest and the newest event of a topic; 1 and 0 where it is empty.
SELECT coalesce(min(eql_id), 1), coalesce(max(eql_id), 0) FROM {schema}.{event_table};

-- before_time -- The id of the last event that entered the log before a time, or else one before the first id. Times
-- have no index but grow with ids: this bisects the ids, with at most 63 steps in the primary key. Events below `low`
-- are older than the time.
WITH RECURSIVE search (low, high) AS (
    SELECT coalesce(min(eql_id), 1), coalesce(max(eql_id), 0) + 1 FROM {schema}.{event_table}
    UNION ALL
    SELECT CASE WHEN probe.older THEN probe.eql_id + 1 ELSE search.low END,
           CASE WHEN probe.older THEN search.high ELSE search.low + ((search.high - search.low) / 2) END
    FROM search
    CROSS JOIN LATERAL (
        SELECT eql_id, eql_created_at::timestamptz < %(time)s::timestamptz AS older
        FROM {schema}.{event_table}
        WHERE eql_id >= (search.low + ((search.high - search.low) / 2))
        ORDER BY eql_id
        LIMIT 1
    ) probe
    WHERE search.low < search.high
)
SELECT low - 1 FROM search WHERE low >= high;

-- nth_before -- The offset of the n-th event from an offset backwards, if there are as many; `skip` is n - 1.
SELECT eql_id
FROM {schema}.{event_table}
WHERE {in_partition} eql_id <= %(offset)s
ORDER BY eql_id DESC
OFFSET %(skip)s
LIMIT 1;

-- count_upto -- How many events a range of offsets holds, at most `most`.
SELECT count(*) FROM (
    SELECT FROM {schema}.{event_table} WHERE {in_partition} eql_id > %(after)s AND eql_id <= %(upto)s LIMIT %(most)s
) found;

-- nth -- The offset of the n-th event after an offset, if there are as many; `most` is n.
SELECT eql_id
FROM {schema}.{event_table}
WHERE {in_partition} eql_id > %(after)s AND eql_id <= %(upto)s
ORDER BY eql_id
OFFSET %(most)s::bigint - 1
LIMIT 1;
