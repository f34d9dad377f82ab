-- The guard of a repartitioned log. `storage/legacy_writer_trigger.py` installs it when a topic first needs it.

-- Gives an event a partition as publishers do: the partition of its key, or any partition for an event without a key.
CREATE OR REPLACE FUNCTION {schema}.place_in_layout() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.eql_key IS NULL THEN
        NEW.eql_partition := pg_catalog.mod(NEW.eql_id, TG_ARGV[0]::bigint);
    ELSE
        NEW.eql_partition := {schema}.partition_of_key(NEW.eql_key, TG_ARGV[0]::integer);
    END IF;
    RETURN NEW;
END
$$;
