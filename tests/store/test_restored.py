"""A dump of the store, with its archive and snapshots, goes on in another server."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventsql_orchestration import EventSQL
from eventsql_orchestration.database import Connection
from eventsql_orchestration.database.embedded.programs import find_programs
from eventsql_orchestration.errors import DatabaseError, RestoredStoreError
from eventsql_orchestration.store import RecordedChange, Store, SubscriptionOptions
from tests.conftest import own_server
from tests.store.test_archive import closed
from tests.store.test_order import numbers, put


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """An empty database of another server."""
    with own_server() as server:
        server.start()
        yield server.create_database("restored")


def program(name: str, *arguments: str) -> None:
    subprocess.run([find_programs() / name, *arguments], capture_output=True, check=True)


def effects(store: Store) -> list[int]:
    with store.database.connection() as connection:
        return [number for (number,) in connection.execute("SELECT n FROM public.effect ORDER BY n")]


def test_an_archive_snapshots_and_subscriptions_go_on_in_another_server(
    platform: EventSQL, direct_dsn: str, elsewhere: str, tmp_path: Path
) -> None:
    broken = {2}

    def handle(change: RecordedChange, connection: Connection) -> None:
        if change.data["n"] in broken:
            raise ValueError("not today")
        connection.execute("INSERT INTO public.effect VALUES (%s)", [change.data["n"]])

    options = SubscriptionOptions(batch=1, max_attempts=1)
    before = platform.store
    with before.database.connection() as connection:
        connection.execute("CREATE TABLE public.effect (n bigint)")
    closed(before, "1", 1, 2)
    put(before, "2", 3)
    closed(before, "3", 4, 5)
    before.save_snapshot("order", "1", 2, {"n": 2})
    subscription = before.subscribe("mailer", handle, background=False, options=options)
    for _ in range(3):
        subscription.run_once()
    before.archive_stream("order", "1")
    before.archive_stream("order", "3")
    last = before.read_all(limit=4)[-1]

    dump = tmp_path / "store.dump"
    program("pg_dump", "--format=custom", f"--file={dump}", direct_dsn)
    program("pg_restore", "--exit-on-error", f"--dbname={elsewhere}", str(dump))

    with EventSQL(elsewhere, transfer=False) as restored:
        store = restored.store
        with pytest.raises(RestoredStoreError, match="eventsql store adopt"):
            store.read_all(last.checkpoint)
        with pytest.raises(RestoredStoreError, match="eventsql store adopt"):
            put(store, "2", 6)

        assert store.adopt().changes == 5
        put(store, "2", 6)
        assert store.unarchive_stream("order", "1") == 2
        assert numbers(store.read_all()) == [1, 2, 3, 4, 5, 6]
        with pytest.raises(DatabaseError, match="checkpoint_of"):
            store.read_all(last.checkpoint)
        on = store.checkpoint_of(last.aggregate_type, last.aggregate_id, last.version)
        assert numbers(store.read_all(on)) == [5, 6]

        kept = store.snapshot("order", "1")
        assert kept is not None
        assert kept.state == {"n": 2}
        broken.clear()
        subscription = store.subscribe("mailer", handle, background=False, options=options)
        while subscription.run_once().more:
            pass
        assert subscription.redrive() == 1
        assert effects(store) == [1, 2, 3, 4, 5, 6]
