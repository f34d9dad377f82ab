"""Changes that older versions of this package append keep the order of their aggregate's versions, too.

An older version names no transaction, and took the default: that of its own. It could lie before the one of the change
that the aggregate had already.
"""

from __future__ import annotations

from eventsql_orchestration.database.migrations import install, run

revision = "0023"
down_revision = "0022"

# 0 marks an append by an older version. Newer versions name the transaction, so the trigger is never called for them.
# The strongest lock comes first. With a weaker one before it, a transaction that reads, and appends while the revision
# waits for it, would be in a deadlock with the revision.
_MARK = "ALTER TABLE aggregate_change ALTER COLUMN eql_transaction SET DEFAULT '0'::xid8;"
_ORDER = """
CREATE TRIGGER order_change BEFORE INSERT ON aggregate_change
    FOR EACH ROW WHEN (NEW.eql_transaction = '0'::xid8) EXECUTE FUNCTION order_change();
"""


def upgrade() -> None:
    run(_MARK)
    install("store")
    run(_ORDER)
