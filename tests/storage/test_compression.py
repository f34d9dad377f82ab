"""The compression of a topic's blocks: chosen when the topic is created, changed later, followed by compaction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.database import Connection
from eventsql_orchestration.errors import DatabaseBusyError, RedefinitionError, RegistryError, ValidationError
from eventsql_orchestration.model import Compression

BATCH = [Publication("orders", b"%06d %s" % (number, b"of the same kind " * 8)) for number in range(200)]


def compressions(platform: EventSQL) -> list[str | None]:
    """How the values of the log's blocks are compressed, in their order."""
    with platform.database.connection() as connection:
        rows = connection.execute(
            "SELECT pg_column_compression(eql_values) FROM eventsql.orders_block ORDER BY eql_id"
        ).fetchall()
    return [found for (found,) in rows]


def has_lz4(platform: EventSQL) -> bool:
    with platform.database.connection() as connection:
        query = "SELECT 'lz4' = ANY (enumvals) FROM pg_settings WHERE name = 'default_toast_compression'"
        return connection.execute(query).fetchone() == (True,)


def values(platform: EventSQL) -> list[bytes]:
    return [event.value for event in platform.reader.read("orders")]


@contextmanager
def reading(platform: EventSQL) -> Iterator[Connection]:
    """A transaction that has read the log and does not end."""
    with platform.database.connection() as connection, connection.transaction():
        connection.execute("SELECT count(*) FROM eventsql.orders_block")
        yield connection


def test_a_topic_without_a_compression_keeps_events_as_they_are(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks", compression="none"))
    platform.publisher.publish_all(BATCH)
    assert compressions(platform) == [None]
    assert platform.registry.topic("orders").compression == "none"


def test_a_topic_that_names_no_compression_has_lz4_where_the_server_has_it(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    platform.publisher.publish_all(BATCH)
    expected = "lz4" if has_lz4(platform) else None
    assert compressions(platform) == [expected]
    assert platform.registry.topic("orders").compression == (expected or "none")


def test_blocks_are_compressed_as_their_topic_says(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks", compression="pglz"))
    platform.publisher.publish_all(BATCH)
    assert compressions(platform) == ["pglz"]
    assert values(platform) == [each.value for each in BATCH]
    assert platform.registry.topic("orders").compression == "pglz"


def test_a_server_without_lz4_refuses_it_before_anything_is_written(platform: EventSQL) -> None:
    compressed = Topic("orders", storage="blocks", compression="lz4")
    if has_lz4(platform):
        platform.registry.register_topic(compressed)
        platform.publisher.publish_all(BATCH)
        assert compressions(platform) == ["lz4"]
        return
    with pytest.raises(RegistryError):
        platform.registry.register_topic(compressed)
    assert platform.registry.topics() == []
    platform.registry.register_topic(Topic("orders", storage="blocks"))
    with pytest.raises(RegistryError):
        platform.registry.set_compression("orders", "lz4")
    assert platform.registry.topic("orders").compression == "none"


def test_a_changed_compression_counts_for_new_blocks_in_present_segments(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks", compression="none"))
    platform.publisher.publish_all(BATCH)
    assert platform.registry.set_compression("orders", "pglz")
    assert not platform.registry.set_compression("orders", "pglz")
    platform.publisher.publish_all(BATCH)
    assert platform.registry.set_compression("orders", "none")
    platform.publisher.publish_all(BATCH)
    assert compressions(platform) == [None, "pglz", None]
    assert values(platform) == [each.value for each in BATCH] * 3


def test_compaction_compresses_the_blocks_that_it_merges(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks", compression="pglz"))
    for each in BATCH:
        platform.publisher.publish(each)
        platform.transfer.run_once()
    assert set(compressions(platform)) == {None}
    platform.registry.set_storage("orders", "rows")
    platform.compactor.execute("orders")
    assert compressions(platform) == ["pglz"]


def test_a_topic_in_rows_keeps_its_compression_for_later(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", storage="rows"))
    assert platform.registry.set_compression("orders", "pglz")
    platform.registry.set_storage("orders", "blocks")
    platform.publisher.publish_all(BATCH)
    assert compressions(platform) == ["pglz"]


def test_a_topic_that_was_restored_from_a_server_with_lz4_gets_blocks(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", storage="rows", compression="none"))
    with platform.database.transaction() as connection:
        connection.execute("UPDATE eventsql.topic SET eql_compression = 'lz4'")
    platform.registry.set_storage("orders", "blocks")
    platform.publisher.publish_all(BATCH)
    assert compressions(platform) == ["lz4" if has_lz4(platform) else None]


def test_a_declared_compression_that_a_topic_does_not_have_is_refused(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks", compression="pglz"))
    platform.registry.register_topic(Topic("orders"))
    with pytest.raises(RedefinitionError):
        platform.registry.register_topic(Topic("orders", compression="none"))


def test_a_compression_is_not_changed_while_a_reader_does_not_end(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", storage="blocks", compression="none"))
    with reading(platform), pytest.raises(DatabaseBusyError):
        platform.registry.set_compression("orders", "pglz", timeout=0)
    assert platform.registry.topic("orders").compression == "none"


@pytest.mark.parametrize("compression", ["zstd", "", None, 1])
def test_an_unknown_compression_is_refused(platform: EventSQL, compression: Compression) -> None:
    platform.registry.register_topic(Topic("orders"))
    with pytest.raises(ValidationError):
        platform.registry.set_compression("orders", compression)
