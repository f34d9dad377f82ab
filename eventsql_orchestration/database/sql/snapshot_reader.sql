-- after -- The rows after a checkpoint that no transaction which goes on can come before.
-- The snapshot whose horizon it asks for is the one that it reads by. Qualified: the first output column is a text.
SELECT source.{transaction}::text, source.{position}{comma}{columns}
FROM {table} source
WHERE (source.{transaction}, source.{position}) > (%(transaction)s::xid8, %(position)s)
  AND source.{transaction} < pg_snapshot_xmin(pg_current_snapshot()){only}
ORDER BY source.{transaction}, source.{position}
LIMIT %(limit)s;

-- horizon -- The oldest transaction that may still write.
SELECT pg_snapshot_xmin(pg_current_snapshot())::text;

-- held_back -- How many committed rows lie beyond the horizon.
SELECT count(*)
FROM {table} source
WHERE source.{transaction} >= pg_snapshot_xmin(pg_current_snapshot()){only};

-- newest -- The newest transaction of a table, and whether this server has not had it yet: no row that is seen can have one.
-- One that goes on sees its own rows, and may be newer than all that have ended.
SELECT source.{transaction}::text,
       source.{transaction} >= pg_snapshot_xmax(pg_current_snapshot())
           AND source.{transaction} = pg_current_xact_id_if_assigned() IS NOT TRUE
FROM {table} source
WHERE true{only}
ORDER BY source.{transaction} DESC
LIMIT 1;
