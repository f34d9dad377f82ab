"""Changes that older versions of this package append keep the order of their aggregate's versions, too.

An older version names no transaction, and took the default: that of its own. It could lie before the one of the change
that the aggregate had already.
"""

from __future__ import annotations

from alembic import context

from eventsql_orchestration.database.migrations import run

revision = "0023"
down_revision = "0022"

# 0 marks an append by an older version. Newer versions name the transaction, so the trigger is never called for them.
# The strongest lock comes first. With a weaker one before it, a transaction that reads, and appends while the revision
# waits for it, would be in a deadlock with the revision.
_ORDER = """
ALTER TABLE aggregate_change ALTER COLUMN eql_transaction SET DEFAULT '0'::xid8;
CREATE FUNCTION {schema}.order_change() RETURNS trigger
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
CREATE TRIGGER order_change BEFORE INSERT ON aggregate_change
    FOR EACH ROW WHEN (NEW.eql_transaction = '0'::xid8) EXECUTE FUNCTION {schema}.order_change();
"""


def upgrade() -> None:
    name = context.config.attributes["schema"]
    run(_ORDER.replace("{schema}", f'"{name}"'))
