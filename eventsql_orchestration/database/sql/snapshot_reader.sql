-- part had -- Whether this server has had a checkpoint's transaction. True also where that is not known: on a standby,
-- which may be behind, and for a snapshot that lasts for a transaction.
pg_is_in_recovery() OR %(transaction)s::xid8 < pg_snapshot_xmax(pg_current_snapshot())
    OR (%(transaction)s::xid8 = pg_current_xact_id_if_assigned()) IS TRUE
    OR current_setting('transaction_isolation') <> 'read committed'

-- after -- Rows after a checkpoint that no open transaction can still precede. The horizon is that of the statement's
-- own snapshot.
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

-- foreign -- The newest transaction in a table beyond this server's: visible rows cannot have such a transaction, except
-- rows of the current transaction. Then, whether this server has had a checkpoint's transaction.
SELECT
    (
        SELECT source.{transaction}::text
        FROM {table} source
        WHERE source.{transaction} >= pg_snapshot_xmax(pg_current_snapshot())
          AND source.{transaction} = pg_current_xact_id_if_assigned() IS NOT TRUE{only}
        ORDER BY source.{transaction} DESC
        LIMIT 1
    ),
    {had};

-- reached -- Whether this server has had a checkpoint's transaction.
SELECT {had};
