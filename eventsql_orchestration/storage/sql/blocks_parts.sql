-- part base -- The id before the first event of a block.
(eql_id - coalesce(eql_span, eql_events))

-- part farthest of id -- The largest id that a block can have that begins before an id: a block has at most 20,000 ids.
(least({id}, 9223372036854755807) + 20000)

-- part up_to of place -- How many events of a block have ids up to an offset. Only blocks with gaps have their array read.
CASE WHEN {place} >= eql_id THEN eql_events
     WHEN {place} <= {base} THEN 0
     WHEN eql_span IS NULL THEN ({place} - {base})::int
     ELSE width_bucket(({place} - {base})::smallint, eql_places) END

-- part id_at of number -- The id of an event of a block, by its number from 1.
({base} + CASE WHEN eql_span IS NULL THEN {number} ELSE eql_places[({number})::int] END)

-- part entered_at of number -- When an event of a block entered the log.
coalesce(eql_entered[({number})::int], eql_created_at)

-- The parts below look for the events of a range, and name its ends `after` and `upto`.

-- part held -- How many events of a block the range has.
({up_to of {upto}} - {up_to of {after}})

-- part near -- Excludes the blocks after the range by their ids, so that the server can use an index and skip segments.
eql_id <= {farthest of {upto}}

-- part in_range -- The blocks that may have events of the range.
eql_id > {after} AND {near} AND {base} < {upto} AND {after} < {upto}

-- part runs -- The events of blocks as runs of consecutive ids: the id before the first, and the last one. A block with
-- gaps has a run for each event, with the times of the event. Only compacted logs have such blocks.
CROSS JOIN LATERAL (
    SELECT {base} AS before, eql_id AS last, NULL::timestamptz AS entered, NULL::timestamptz AS published
    WHERE eql_span IS NULL
    UNION ALL
    SELECT {base} + (place - 1), {base} + place, each.entered, each.published
    FROM unnest(eql_places, eql_entered, eql_times) AS each (place, entered, published)
    WHERE eql_span IS NOT NULL
) run

-- part of_runs -- Of each run in the range: the id before its events, their number, when the first entered the log, and
-- when it was published.
greatest(run.before, {after}) AS start, least(run.last, {upto}) - greatest(run.before, {after}) AS held,
coalesce(run.entered, eql_entered[(greatest({after} - run.before, 0))::int + 1], eql_created_at) AS entered,
coalesce(run.published, eql_times[(greatest({after} - run.before, 0))::int + 1], eql_buffered_at) AS published

-- part next_runs of most -- The first runs of the range that have `most` events together, or all. The index finds the first
-- blocks with this number of events. Blocks with gaps that end later may have events before the end of these blocks.
WITH reach AS MATERIALIZED (
    SELECT max(eql_id) AS upto
    FROM (
        SELECT eql_id, (sum(held) OVER (ORDER BY eql_id))::bigint - held AS before
        FROM (
            SELECT eql_id, {held} AS held FROM {schema}.{block_table}
            WHERE {in_partition} {in_range}
            ORDER BY eql_id
            LIMIT {most}
        ) block
    ) found
    WHERE before < {most}
)
SELECT {of_runs}
FROM (
    SELECT * FROM {schema}.{block_table}
    WHERE {in_partition} {in_range} AND eql_id <= (SELECT reach.upto FROM reach)
    UNION ALL
    SELECT * FROM {schema}.{block_table}
    WHERE {in_partition} {in_range} AND eql_span IS NOT NULL AND eql_id > (SELECT reach.upto FROM reach)
      AND eql_id <= {farthest of (SELECT reach.upto FROM reach)} AND {base} < (SELECT reach.upto FROM reach)
) block
{runs}
WHERE run.last > {after} AND run.before < {upto} AND run.last <= (SELECT reach.upto FROM reach)

-- part numbered of most -- The runs of `next_runs` in order, with the number of the events before each run.
SELECT runs.*, (sum(held) OVER (ORDER BY start))::bigint - held AS before
FROM ({next_runs of {most}}) runs
