"""A key has one partition for every publisher: each way of publishing, and EventSQL's own rule."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from pyspark.sql import DataFrame, SparkSession

from eventsql_orchestration import EventSQL, Publication, Topic
from eventsql_orchestration.spark import FORMAT
from tests.conftest import Administrator
from tests.shard_keys import shard_of_key

PARTITIONS = 7
KEYS = ["", "a", "ké", "键", "a" * 300, *(f"key-{number}" for number in range(60))]


def prepare(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", partitions=PARTITIONS))


pytestmark = pytest.mark.prepared.with_args(prepare)


def publications() -> list[Publication]:
    return [Publication("orders", b"value", key=key) for key in KEYS]


def rows(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame([(key, b"value") for key in KEYS], "key string, value binary")


def one_by_one(platform: EventSQL, spark: SparkSession) -> None:
    for publication in publications():
        platform.publisher.publish(publication)


def straight(platform: EventSQL, spark: SparkSession) -> None:
    platform.publisher.publish_all(publications())
    assert platform.buffered() == {}, "the batch was to go straight into the log"


def through_the_buffer(platform: EventSQL, spark: SparkSession) -> None:
    with EventSQL(platform.database.dsn, transfer=False, straight=False) as another:
        another.publisher.publish_all(publications())
        assert another.buffered() == {"orders": len(KEYS)}


def in_a_transaction(platform: EventSQL, spark: SparkSession) -> None:
    with platform.database.transaction() as connection:
        platform.publisher.publish_all(publications(), connection=connection)


def buffered(platform: EventSQL, spark: SparkSession) -> None:
    publisher = platform.buffered_publisher()
    for publication in publications():
        publisher.publish(publication)
    publisher.flush(timeout=60)


def asynchronous(platform: EventSQL, spark: SparkSession) -> None:
    async def publish() -> None:
        async with platform.async_publisher() as publisher:
            await asyncio.gather(*(publisher.publish(publication) for publication in publications()))

    asyncio.run(publish())


def spark_batch(platform: EventSQL, spark: SparkSession) -> None:
    rows(spark).write.format(FORMAT).options(dsn=platform.database.dsn, topic="orders").mode("append").save()


PUBLISHERS = [one_by_one, straight, through_the_buffer, in_a_transaction, buffered, asynchronous, spark_batch]


@pytest.mark.parametrize("publish", PUBLISHERS, ids=lambda publish: publish.__name__)
def test_a_key_has_one_partition_for_every_publisher(
    spark: SparkSession, platform: EventSQL, publish: Callable[[EventSQL, SparkSession], None]
) -> None:
    publish(platform, spark)
    platform.transfer.run_once()
    found = {event.key: event.partition for event in platform.reader.read("orders")}
    # The rule of EventSQL, written down once more: it must never change.
    assert found == {key: int(hashlib.sha256(key.encode()).hexdigest(), 16) % PARTITIONS for key in KEYS}


def test_a_key_has_one_shard_and_one_partition_there_for_every_publisher(
    spark: SparkSession, administrator: Administrator
) -> None:
    with ExitStack() as stack:
        dsns = [stack.enter_context(administrator.copied()) for _ in range(3)]
        platform = stack.enter_context(EventSQL(*dsns, transfer=False))
        platform.registry.register_topic(Topic("orders", partitions=PARTITIONS))
        options = {"dsn": " ".join(dsns), "topic": "orders", "writerId": "conformance"}
        for _ in range(2):
            rows(spark).write.format(FORMAT).options(**options).mode("append").save()
        platform.publisher.publish_all(publications())
        platform.transfer.run_once()
        found: dict[str | None, list[tuple[str | None, int]]] = {}
        for shard in platform.shards:
            for event in shard.reader.read("orders"):
                found.setdefault(event.key, []).append((shard.name, event.partition))
        names = ["shard-1", "shard-2", "shard-3"]
    assert found == {
        key: [(shard_of_key(key, names), int(hashlib.sha256(key.encode()).hexdigest(), 16) % PARTITIONS)] * 2
        for key in KEYS
    }
