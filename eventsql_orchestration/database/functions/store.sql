-- The order of the event store's changes.

-- Orders the changes that older versions of this package append. These versions name no transaction. The number of
-- their transaction may be less than the number of the aggregate's last change: then the change gets the larger
-- number.
CREATE OR REPLACE FUNCTION {schema}.order_change() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
BEGIN
    UPDATE {schema}.aggregate
    SET eql_transaction = greatest(eql_transaction, pg_current_xact_id())
    WHERE eql_type = NEW.eql_type AND eql_id = NEW.eql_aggregate_id
    RETURNING eql_transaction INTO NEW.eql_transaction;
    IF NOT FOUND THEN
        NEW.eql_transaction := pg_current_xact_id();
    END IF;
    RETURN NEW;
END
$$;
REVOKE EXECUTE ON FUNCTION {schema}.order_change() FROM PUBLIC;
