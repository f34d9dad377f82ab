-- parts of forms

-- part last_id_by_own -- The last id of the log; NULL if its sequence `own` does not give ids one by one and upwards.
(SELECT pg_sequence_last_value(own.sequence)
FROM own
CROSS JOIN LATERAL pg_sequence_parameters(own.sequence) settings
WHERE settings.cache_size = 1 AND settings.increment > 0 AND NOT settings.cycle_option)

-- part events_of_row -- How many events a row of the buffer stands for; `limit` if it stands for a block that is missing.
CASE WHEN eql_partition >= -1 THEN 1 ELSE coalesce(eql_events, (
    SELECT (block.eql_metadata ->> 'events')::bigint FROM {schema}.spark_staged_event block WHERE block.eql_buffer_id = buffered.eql_id
), %(limit)s) END

-- part drawn -- Take an id of the log for each of the `wanted` events, from its sequence `own`: the id before them, the last
-- one, and whether they are usable: consecutive, and larger than the id `after` of `wanted`. They are not if another program
-- takes ids too, or sets the sequence back at that moment. OFFSET skips the ids between the first and the last, but the
-- server still takes them; an aggregate over all ids takes twice the time. `setval` would take the ids at once, but
-- it needs another right, and gives ids twice if another program takes some at that moment.
first AS MATERIALIZED (
    SELECT nextval(own.sequence) AS id FROM own CROSS JOIN wanted WHERE wanted.events > 0
), rest AS MATERIALIZED (
    SELECT nextval(own.sequence) AS id
    FROM first CROSS JOIN own CROSS JOIN generate_series(2, (SELECT events FROM wanted))
    OFFSET (SELECT greatest(events - 2, 0) FROM wanted)
), ids AS MATERIALIZED (
    SELECT first - 1 AS before, last,
           last - first + 1 = (SELECT events FROM wanted) AND first > (SELECT after FROM wanted) AS usable
    FROM (SELECT (SELECT id FROM first) AS first, coalesce((SELECT id FROM rest), (SELECT id FROM first)) AS last) drawn
)

-- append_state -- The state of a topic for a publisher that holds it: partitions and layout; the time; the last id,
-- number and bytes of the events in at most `limit` rows of its buffer; the last id of the log, and its form. Where nothing
-- is buffered, it takes `events` ids of the log: the first one, and whether they are usable. It also says whether the
-- current role may publish to the topic, as the trigger of the buffer finds it. psycopg parses statements of more than 4,096
-- bytes at each execution.
WITH own AS MATERIALIZED (
    {found}
), state AS MATERIALIZED (
    SELECT coalesce(max(eql_id), 0) AS upto, coalesce(sum({events_of_row}), 0)::bigint AS buffered,
           coalesce(sum(octet_length(eql_value) + pg_column_size(eql_metadata) + coalesce(pg_column_size(eql_values), 0)), 0)
               AS bytes,
           {last_id_by_own} AS last_id, {form_by_own} AS form
    FROM (
        SELECT eql_id, eql_partition, eql_events, eql_value, eql_metadata, eql_values FROM {schema}.event_buffer
        WHERE (eql_topic, eql_id) > (%(topic)s, %(low_water)s) AND (eql_topic, eql_id) <= (%(topic)s, 9223372036854775807)
        ORDER BY eql_topic, eql_id
        LIMIT %(limit)s
    ) buffered
), wanted AS (
    SELECT CASE WHEN state.buffered = 0 THEN %(events)s::bigint ELSE 0 END AS events, state.last_id AS after FROM state
), {drawn}
SELECT (SELECT ARRAY[eql_partitions, eql_layout] FROM {schema}.topic WHERE eql_name = %(topic)s),
       statement_timestamp(), state.upto, state.buffered, state.bytes, state.last_id, state.form,
       NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = '{schema}.event_buffer'::regclass AND tgname = %(trigger)s)
           OR has_function_privilege('{schema}.publish_anywhere()'::regprocedure, 'EXECUTE')
           OR has_column_privilege('{schema}.{event_table}'::regclass, 'eql_id', 'INSERT'),
       ids.before + 1, ids.usable
FROM state CROSS JOIN ids;

-- now -- The time of this statement.
SELECT statement_timestamp();

-- end_of_log -- The last id of the log, as in `last_id_by_own`.
SELECT (WITH own AS ({found}) SELECT {last_id_by_own});

-- count_after -- How many rows have ids above this one.
SELECT count(*) FROM {schema}.{row_store} WHERE eql_id > %(after)s;

-- append -- Any number of encoded events to the end of the topic's log.
COPY {schema}.{row_store} (eql_buffered_at, eql_created_at, eql_key, eql_value, eql_metadata, eql_partition)
FROM STDIN (FORMAT binary);

-- batch_end -- A batch of at most `limit` rows of the buffer: its last id, the number of rows, the topic's
-- partitions, whether there are blocks in it, the last id of the log, the bytes of single events, and the log's form.
-- Every read of the buffer compares (topic, id): otherwise the server might walk over all other topics, because the
-- buffer fills and empties faster than its statistics change.
WITH own AS MATERIALIZED (
    {found}
)
SELECT coalesce(max(eql_id), 0), count(*), (SELECT eql_partitions FROM {schema}.topic WHERE eql_name = %(topic)s),
       coalesce(bool_or(eql_partition < -1), false), {last_id_by_own},
       coalesce(sum(octet_length(eql_value) + pg_column_size(eql_metadata)), 0), {form_by_own}
FROM (
    SELECT eql_id, eql_partition, eql_value, eql_metadata FROM {schema}.event_buffer
    WHERE (eql_topic, eql_id) > (%(topic)s, %(low_water)s) AND (eql_topic, eql_id) <= (%(topic)s, %(newest)s)
    ORDER BY eql_topic, eql_id
    LIMIT %(limit)s
) batch;

-- first_row -- The first row of a topic in a range of the buffer: its id and partition.
SELECT eql_id, eql_partition FROM {schema}.event_buffer
WHERE (eql_topic, eql_id) > (%(topic)s, %(low_water)s) AND (eql_topic, eql_id) <= (%(topic)s, %(upto)s)
ORDER BY eql_topic, eql_id
LIMIT 1;

-- part before_blocks -- Events of the buffer up to an id, and before the first block: since the batch was looked at, a
-- publisher may have committed a block and an event after it.
(eql_topic, eql_id) > (%(topic)s, %(low_water)s) AND (eql_topic, eql_id) <= (%(topic)s, %(upto)s)
    AND (eql_topic, eql_id) < (%(topic)s, coalesce((
        SELECT block.eql_id FROM {schema}.event_buffer block
        WHERE (block.eql_topic, block.eql_id) > (%(topic)s, %(low_water)s)
          AND (block.eql_topic, block.eql_id) <= (%(topic)s, %(upto)s) AND block.eql_partition < -1
        ORDER BY block.eql_topic, block.eql_id
        LIMIT 1
    ), 9223372036854775807))

-- part own_partition -- The partition of an event: the one that it names, if the topic has it. The topic may have lost the
-- partition since, or a program that writes into the buffer by itself has named another one, which no consumer reads.
-- SELECT hides from the planner that a topic has no partitions. Otherwise such a plan looks cheaper than the general one,
-- and the server makes it anew for each batch, which takes longer than moving an event.
CASE
    WHEN (eql_partition >= 0 AND eql_partition < %(partitions)s) OR (SELECT %(partitions)s < 0) THEN eql_partition
    ELSE coalesce({schema}.partition_of_key(eql_key, %(partitions)s), (eql_id %% %(partitions)s)::smallint)
END

-- part moved -- Take events out of the buffer, each with its partition.
WITH moved AS (
    DELETE FROM {schema}.event_buffer
    WHERE {before_blocks}
    RETURNING eql_id, {own_partition} AS eql_partition, eql_key, eql_value, eql_created_at, eql_metadata
)

-- part into_rows -- Write events to the topic's log.
INSERT INTO {schema}.{row_store} (eql_partition, eql_key, eql_value, eql_buffered_at, eql_created_at, eql_metadata)

-- move -- Move buffered events to the end of the topic's log, in the order of their buffer ids. The statement's time is
-- after the lock, so times grow with ids.
{moved}
{into_rows}
SELECT eql_partition, eql_key, eql_value, eql_created_at, statement_timestamp(), eql_metadata
FROM moved
ORDER BY eql_id;

-- part taken -- Take the next blocks of the buffer, up to its next event, at most `most` and `size` bytes of values, but at
-- least one. A row of the buffer has a block, or stands for a staged one, which is taken too. The setting tells the
-- buffer's trigger that this program knows blocks. `at_home`: the topic has the partition.
WITH next AS MATERIALIZED (
    SELECT eql_id, coalesce(pg_column_size(eql_values), (
               SELECT pg_column_size(eql_values) FROM {schema}.spark_staged_event WHERE eql_buffer_id = buffered.eql_id
           ), 0) AS size
    FROM {schema}.event_buffer buffered
    WHERE (eql_topic, eql_id) > (%(topic)s, %(low_water)s) AND (eql_topic, eql_id) <= (%(topic)s, %(upto)s)
      AND (eql_topic, eql_id) < (%(topic)s, coalesce((
          SELECT event.eql_id FROM {schema}.event_buffer event
          WHERE (event.eql_topic, event.eql_id) > (%(topic)s, %(low_water)s)
            AND (event.eql_topic, event.eql_id) <= (%(topic)s, %(upto)s) AND event.eql_partition <> %(reference)s
          ORDER BY event.eql_topic, event.eql_id
          LIMIT 1
      ), 9223372036854775807))
    ORDER BY eql_topic, eql_id
    LIMIT %(most)s
), chosen AS MATERIALIZED (
    SELECT eql_id FROM (SELECT *, sum(size) OVER (ORDER BY eql_id) AS whole FROM next) sized
    WHERE whole <= %(size)s OR whole = size
), staged AS (
    DELETE FROM {schema}.spark_staged_event WHERE eql_buffer_id = ANY (ARRAY(SELECT eql_id FROM chosen))
    RETURNING eql_buffer_id, eql_partition, (eql_metadata ->> 'events')::int AS events, eql_keys, eql_values,
              eql_event_metadata
), reference AS (
    DELETE FROM {schema}.event_buffer
    WHERE eql_id = ANY (ARRAY(SELECT eql_id FROM chosen)) AND set_config('eventsql.takes_blocks', 'on', true) = 'on'
    RETURNING eql_id, eql_created_at, eql_block_partition, eql_events, eql_keys, eql_values, eql_event_metadata
), block AS (
    SELECT *, eql_partition >= least(%(partitions)s, 0) AND eql_partition < greatest(%(partitions)s, 0) AS at_home
    FROM (
        SELECT reference.eql_id, reference.eql_created_at, staged.eql_partition, staged.events, staged.eql_keys,
               staged.eql_values, staged.eql_event_metadata
        FROM reference JOIN staged ON staged.eql_buffer_id = reference.eql_id
        UNION ALL
        SELECT eql_id, eql_created_at, eql_block_partition, eql_events, eql_keys, eql_values, eql_event_metadata
        FROM reference
        WHERE eql_values IS NOT NULL
    ) taken
)

-- part outcome -- The number of rows that stood for blocks, and the last row's id; the number of sound blocks, and of their
-- events.
SELECT (SELECT count(*) FROM chosen), (SELECT max(eql_id) FROM chosen),
       (SELECT count(*) FROM sound), (SELECT coalesce(sum(events), 0) FROM block)::bigint

-- move_blocks -- Move the next blocks of the buffer to the end of the topic's log, in their order: what `outcome` says,
-- and how many events entered the log.
{taken}, sound AS (
    SELECT FROM block
    WHERE at_home AND cardinality(eql_values) = events
      AND coalesce(cardinality(eql_keys) = events, true) AND coalesce(cardinality(eql_event_metadata) = events, true)
), entered AS (
    INSERT INTO {schema}.{row_store} (
        eql_partition, eql_key, eql_value, eql_buffered_at, eql_created_at, eql_metadata
    )
    SELECT block.eql_partition, event.key, event.value, block.eql_created_at, statement_timestamp(),
           coalesce(event.metadata, '{{}}')
    FROM block
    CROSS JOIN LATERAL unnest(block.eql_keys, block.eql_values, block.eql_event_metadata)
        WITH ORDINALITY AS event (key, value, metadata, number)
    ORDER BY block.eql_id, event.number
    RETURNING eql_id
)
{outcome}, (SELECT count(*) FROM entered);
