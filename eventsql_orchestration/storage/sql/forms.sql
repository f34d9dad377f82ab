-- part found -- The sequence of the ids of a log, and the form of the log. The table that new events enter has the sequence,
-- and a view has none.
SELECT sequence, form
FROM (
    SELECT CASE WHEN form = 'rows' OR to_regclass(log) IS NOT NULL
               THEN pg_get_serial_sequence(log, 'eql_id') END::regclass AS sequence, form
    FROM (VALUES
        ('{schema}.{event_table}', 'rows'), ('{schema}.{block_table}', 'blocks'),
        ('{schema}.{blocks_of_both}', 'both, new blocks'), ('{schema}.{rows_of_both}', 'both, new rows')
    ) known (log, form)
    OFFSET 0
) known
WHERE sequence IS NOT NULL
LIMIT 1

-- part form_by_own -- The form of a log, whose sequence `own` has. A log in blocks that has lost its sequence is still a
-- log in blocks.
CASE WHEN (SELECT relkind = 'v' FROM pg_class WHERE oid = to_regclass('{schema}.{event_table}')) IS NOT TRUE THEN 'rows'
     ELSE coalesce((SELECT form FROM own), 'blocks') END

-- part form -- The form of a log.
(WITH own AS ({found}) SELECT {form_by_own})

-- part ids -- The sequence of a topic's ids, in any form of its log.
(SELECT sequence FROM ({found}) own)

-- part stores -- The tables that hold a log: one table, or the tables of its rows and of its blocks.
(SELECT ARRAY(
    SELECT held.oid FROM pg_class held
    WHERE held.relkind = ANY (ARRAY['r', 'p']) AND held.oid = ANY (CASE
        WHEN (log.relkind = 'v') IS NOT TRUE THEN ARRAY[log.oid]
        WHEN (block.relkind = 'v') IS NOT TRUE THEN ARRAY[block.oid]
        ELSE ARRAY[to_regclass('{schema}.{rows_of_both}'), to_regclass('{schema}.{blocks_of_both}')]::oid[] END)
)
FROM (SELECT) one
LEFT JOIN pg_class log ON log.oid = to_regclass('{schema}.{event_table}')
LEFT JOIN pg_class block ON block.oid = to_regclass('{schema}.{block_table}'))::oid[]

-- form_of -- The form of a log.
SELECT {form};

-- exists -- Whether there is a relation of this name.
SELECT to_regclass(%(name)s) IS NOT NULL;

-- create_rows -- The table of a log in rows.
CREATE TABLE {schema}.{table} (
    eql_id bigserial PRIMARY KEY,
    eql_partition smallint NOT NULL,
    eql_key text,
    eql_value bytea NOT NULL,
    eql_buffered_at timestamptz NOT NULL,
    eql_created_at timestamptz NOT NULL DEFAULT now(),
    eql_metadata json NOT NULL
) PARTITION BY RANGE (eql_id);

-- create_blocks -- The table of a log in blocks. A block has events of one partition; its id is its last event's.
-- The arrays have an element for each event: keys, values, metadata, times of publication, places, times when it entered
-- the log. NULL stands for no keys, no metadata, one time for all, and consecutive ids. A place is how far an id is
-- behind the id before the block's first event, and `eql_span` is the last place. A block with a wrong number or a cut
-- array is refused.
CREATE TABLE {schema}.{table} (
    eql_id bigserial PRIMARY KEY,
    eql_partition smallint NOT NULL,
    eql_events integer NOT NULL,
    eql_buffered_at timestamptz NOT NULL,
    eql_created_at timestamptz NOT NULL,
    eql_times timestamptz[],
    eql_keys text[],
    eql_metadata json[],
    eql_values bytea[] NOT NULL,
    eql_span integer,
    eql_places smallint[],
    eql_entered timestamptz[],
    CONSTRAINT eql_events_of_block CHECK (eql_events >= 1 AND eql_events <= 20000 AND eql_id >= eql_events),
    CONSTRAINT eql_whole_values CHECK (
        array_ndims(eql_values) = 1 AND array_lower(eql_values, 1) = 1 AND cardinality(eql_values) = eql_events
        AND array_position(eql_values, NULL::bytea) IS NULL
    ),
    CONSTRAINT eql_whole_keys CHECK (
        eql_keys IS NULL
        OR array_ndims(eql_keys) = 1 AND array_lower(eql_keys, 1) = 1 AND cardinality(eql_keys) = eql_events
    ),
    CONSTRAINT eql_whole_metadata CHECK (
        eql_metadata IS NULL
        OR array_ndims(eql_metadata) = 1 AND array_lower(eql_metadata, 1) = 1 AND cardinality(eql_metadata) = eql_events
    ),
    CONSTRAINT eql_whole_times CHECK (
        eql_times IS NULL
        OR array_ndims(eql_times) = 1 AND array_lower(eql_times, 1) = 1 AND cardinality(eql_times) = eql_events
    ),
    CONSTRAINT eql_whole_places CHECK (
        (eql_places IS NULL) = (eql_span IS NULL) AND (
            eql_places IS NULL
            OR array_ndims(eql_places) = 1 AND array_lower(eql_places, 1) = 1 AND cardinality(eql_places) = eql_events
            AND eql_places[1] = 1 AND eql_places[eql_events] = eql_span
            AND eql_span > eql_events AND eql_span <= 20000 AND eql_id >= eql_span
        )
    ),
    CONSTRAINT eql_whole_entered CHECK (
        eql_entered IS NULL
        OR array_ndims(eql_entered) = 1 AND array_lower(eql_entered, 1) = 1 AND cardinality(eql_entered) = eql_events
    )
) PARTITION BY RANGE (eql_id);

-- store_apart -- Store arrays out of line and uncompressed: few of their bytes would get smaller. Keep no statistics of
-- them, as in their segments.
ALTER TABLE {schema}.{table}
    ALTER COLUMN eql_times SET STORAGE EXTERNAL, ALTER COLUMN eql_keys SET STORAGE EXTERNAL,
    ALTER COLUMN eql_metadata SET STORAGE EXTERNAL, ALTER COLUMN eql_values SET STORAGE EXTERNAL,
    ALTER COLUMN eql_places SET STORAGE EXTERNAL, ALTER COLUMN eql_entered SET STORAGE EXTERNAL,
    ALTER COLUMN eql_times SET STATISTICS 0, ALTER COLUMN eql_keys SET STATISTICS 0,
    ALTER COLUMN eql_metadata SET STATISTICS 0, ALTER COLUMN eql_values SET STATISTICS 0,
    ALTER COLUMN eql_places SET STATISTICS 0, ALTER COLUMN eql_entered SET STATISTICS 0;

-- compress -- Compress the arrays of a table of blocks. The arrays with the ids of events stay as they are: counting
-- reads them.
ALTER TABLE {schema}.{table}
    ALTER COLUMN eql_times SET STORAGE EXTENDED, ALTER COLUMN eql_keys SET STORAGE EXTENDED,
    ALTER COLUMN eql_metadata SET STORAGE EXTENDED, ALTER COLUMN eql_values SET STORAGE EXTENDED,
    ALTER COLUMN eql_times SET COMPRESSION {method}, ALTER COLUMN eql_keys SET COMPRESSION {method},
    ALTER COLUMN eql_metadata SET COMPRESSION {method}, ALTER COLUMN eql_values SET COMPRESSION {method};

-- compressions -- The compressions that the server has.
SELECT enumvals FROM pg_settings WHERE name = 'default_toast_compression';

-- note_compression -- Note the compression of a topic's blocks.
UPDATE {schema}.topic SET eql_compression = %(compression)s WHERE eql_name = %(topic)s;

-- create_partition_index -- The index that the readers of one partition need.
CREATE INDEX ON {schema}.{table} (eql_partition, eql_id);

-- create_gap_index -- The index of the blocks with gaps, which may lie between blocks of other partitions.
CREATE INDEX ON {schema}.{table} (eql_id) WHERE eql_span IS NOT NULL;

-- part events_of_blocks -- The events of the blocks of a log.
SELECT b.eql_id - coalesce(b.eql_span, b.eql_events) + coalesce(e.place, e.number) AS eql_id, b.eql_partition,
       e.key AS eql_key, e.value AS eql_value, coalesce(e.published, b.eql_buffered_at) AS eql_buffered_at,
       coalesce(e.entered, b.eql_created_at) AS eql_created_at, coalesce(e.metadata, '{{}}'::json) AS eql_metadata
FROM {schema}.{block_store} b
CROSS JOIN LATERAL unnest(b.eql_values, b.eql_keys, b.eql_metadata, b.eql_times, b.eql_places, b.eql_entered)
    WITH ORDINALITY AS e (value, key, metadata, published, place, entered, number)

-- create_view -- The events of a log in blocks, with the columns of a log in rows.
CREATE OR REPLACE VIEW {schema}.{event_table} AS
{events_of_blocks};

-- create_view_of_both -- The events of a log in both forms.
CREATE OR REPLACE VIEW {schema}.{event_table} AS
{events_of_blocks}
UNION ALL
SELECT eql_id, eql_partition, eql_key, eql_value, eql_buffered_at::timestamptz, eql_created_at::timestamptz,
       eql_metadata::json
FROM {schema}.{row_store};

-- part rows_as_blocks -- The rows of a log as blocks of one event.
SELECT eql_id, eql_partition, 1 AS eql_events, eql_buffered_at::timestamptz AS eql_buffered_at,
       eql_created_at::timestamptz AS eql_created_at, NULL::timestamptz[] AS eql_times,
       CASE WHEN eql_key IS NOT NULL THEN ARRAY[eql_key] END AS eql_keys, ARRAY[eql_metadata::json] AS eql_metadata,
       ARRAY[eql_value] AS eql_values, NULL::integer AS eql_span, NULL::smallint[] AS eql_places,
       NULL::timestamptz[] AS eql_entered
FROM {schema}.{row_store}

-- create_view_of_blocks -- The blocks of a log in both forms.
CREATE VIEW {schema}.{block_table} AS
SELECT eql_id, eql_partition, eql_events, eql_buffered_at, eql_created_at, eql_times, eql_keys, eql_metadata, eql_values,
       eql_span, eql_places, eql_entered
FROM {schema}.{block_store}
UNION ALL
{rows_as_blocks};

-- leave_view_of_blocks -- Let the view of the blocks of a log in both forms show its rows alone, for programs that have not
-- noticed yet that the log has no blocks any more.
CREATE OR REPLACE VIEW {schema}.{block_table} AS
{rows_as_blocks};

-- has_view_of_blocks -- Whether there is a view of the blocks of a log. Others may have a view of this name.
SELECT EXISTS (
    SELECT FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'eql_places'
    WHERE c.oid = to_regclass('{schema}.{block_table}') AND c.relkind = 'v'
);

-- refuse_rows -- Tell programs that know no blocks, such as EventSQL's Java library, that they cannot write to the log.
CREATE TRIGGER eql_refuse_rows INSTEAD OF INSERT OR UPDATE OR DELETE ON {schema}.{event_table}
    FOR EACH ROW EXECUTE FUNCTION {schema}.refuse_rows();

-- drop_view -- Drop the view of a log in blocks.
DROP VIEW {schema}.{event_table};

-- drop_view_of_blocks -- Drop the view of the blocks of a log in both forms.
DROP VIEW {schema}.{block_table};

-- drop_rows -- Drop the table of the rows of a log, if it is there.
DROP TABLE IF EXISTS {schema}.{row_store};

-- drop_blocks -- Drop the table of the blocks of a log.
DROP TABLE {schema}.{block_store};

-- broken_blocks -- At most 100 blocks that are not whole, overlap a block before them, or are of a partition that their
-- topic never had. Only the newest 1,000 blocks' arrays are read. A block with gaps may lie between blocks of other
-- partitions.
SELECT eql_id, eql_partition,
       CASE WHEN NOT whole THEN 'its number of events is not that of its values'
           WHEN NOT ascending THEN 'its ids do not ascend'
           WHEN overlapping THEN 'it overlaps the block before it'
           ELSE 'the topic never had its partition' END
FROM (
    SELECT block.eql_id, block.eql_partition,
           newest IS NOT TRUE OR eql_events >= 1 AND cardinality(eql_values) = eql_events
               AND coalesce(cardinality(eql_keys), eql_events) = eql_events
               AND coalesce(cardinality(eql_metadata), eql_events) = eql_events
               AND coalesce(cardinality(eql_times), eql_events) = eql_events
               AND coalesce(cardinality(eql_places), eql_events) = eql_events
               AND coalesce(cardinality(eql_entered), eql_events) = eql_events AS whole,
           newest IS NOT TRUE OR eql_span IS NULL OR (
               SELECT min(place) = 1 AND max(place) = eql_span AND bool_and(place > before IS NOT FALSE)
               FROM (
                   SELECT place, lag(place) OVER (ORDER BY number) AS before
                   FROM unnest(eql_places) WITH ORDINALITY AS own (place, number)
               ) places
           ) AS ascending,
           coalesce(block.eql_id - coalesce(eql_span, eql_events)
               < greatest(of_partition, CASE WHEN eql_span IS NULL THEN without_gaps END), false) AS overlapping,
           block.eql_partition >= greatest(
               (SELECT eql_partitions FROM {schema}.topic WHERE eql_name = %(topic)s),
               (SELECT max(eql_partitions) FROM {schema}.topic_layout WHERE eql_topic = %(topic)s), 0
           ) AS foreign_partition
    FROM (
        SELECT *, row_number() OVER (ORDER BY eql_id DESC) <= 1000 AS newest,
               lag(eql_id) OVER (PARTITION BY eql_partition ORDER BY eql_id) AS of_partition,
               max(CASE WHEN eql_span IS NULL THEN eql_id END) OVER (
                   ORDER BY eql_id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
               ) AS without_gaps
        FROM {schema}.{block_store}
    ) block
) block
WHERE NOT whole OR NOT ascending OR overlapping OR foreign_partition
ORDER BY eql_id
LIMIT 100;
