"""A key has its partition for ever, the same for every publisher, in this language and in Java."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from eventsql_orchestration import NOT_PARTITIONED, EventSQL, Publication, Topic
from eventsql_orchestration.errors import PartitionOutOfRangeError
from eventsql_orchestration.topics.partitioner import default_partition, default_partitions, partition_of_key

# Computed apart from this package: sha256sum of the key, and its remainder by bc.
VECTORS = [
    ("", {1: 0, 3: 1, 10: 9, 32767: 2423}),
    ("42", {1: 0, 3: 0, 10: 3, 32767: 24273}),
    ("a", {1: 0, 3: 1, 10: 9, 32767: 25929}),
    ("key-0", {1: 0, 3: 2, 10: 8, 32767: 12951}),
    ("użytkownik-7", {1: 0, 3: 1, 10: 5, 32767: 16874}),
    ("车牌/🚕", {1: 0, 3: 1, 10: 1, 32767: 1227}),
    ("00000000-0000-0000-0000-000000000001", {1: 0, 3: 1, 10: 2, 32767: 12947}),
]


@pytest.mark.parametrize(
    ("key", "partitions", "partition"),
    [(key, partitions, partition) for key, known in VECTORS for partitions, partition in known.items()],
)
def test_the_partition_of_a_key_is_the_remainder_of_its_sha256(key: str, partitions: int, partition: int) -> None:
    assert partition_of_key(key, partitions) == partition
    assert default_partition(Publication("t", b"", key=key), partitions) == partition


def test_an_event_without_a_key_goes_to_any_partition() -> None:
    drawn = Counter(default_partition(Publication("t", b""), 4) for _ in range(4_000))
    assert sorted(drawn) == [0, 1, 2, 3]
    assert min(drawn.values()) > 800


def test_a_topic_that_is_not_partitioned_has_no_partition_for_any_key() -> None:
    assert default_partition(Publication("t", b"", key="42"), NOT_PARTITIONED) == NOT_PARTITIONED
    assert default_partition(Publication("t", b""), NOT_PARTITIONED) == NOT_PARTITIONED


@pytest.mark.parametrize("partitions", [NOT_PARTITIONED, 1, 3, 10, 32767])
def test_many_events_have_the_partitions_that_each_has_alone(partitions: int) -> None:
    publications = [Publication("t", b"", key=key) for key, _ in VECTORS]
    alone = [default_partition(each, partitions) for each in publications]
    assert default_partitions(publications, partitions) == alone


def test_many_events_without_a_key_go_to_any_partition() -> None:
    assert set(default_partitions([Publication("t", b"")] * 1_000, 4)) == {0, 1, 2, 3}


def test_events_are_stored_in_the_partition_of_their_key(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 10))
    platform.publisher.publish_all(Publication("orders", b"", key=key) for key, _ in VECTORS)
    for key, _ in VECTORS:
        platform.publisher.publish(Publication("orders", b"", key=key))
    platform.transfer.run_once()
    stored = {(event.key, event.partition) for event in platform.reader.read("orders")}
    assert stored == {(key, known[10]) for key, known in VECTORS}


def test_a_partitioner_of_ones_own_is_asked_for_every_event(platform: EventSQL) -> None:
    platform.registry.register_topic(Topic("orders", 10))
    platform.publisher.configure_partitioner(lambda publication, partitions: len(publication.value) % partitions)
    platform.publisher.publish(Publication("orders", b"three"))
    platform.publisher.publish_all([Publication("orders", b"x" * 12), Publication("orders", b"", partition=9)])
    platform.transfer.run_once()
    assert [event.partition for event in platform.reader.read("orders")] == [5, 2, 9]


def test_a_partitioner_may_choose_by_a_whole_number_of_another_library(platform: EventSQL) -> None:
    chosen: Any = np.int64(7)
    platform.registry.register_topic(Topic("orders", 10))
    platform.publisher.configure_partitioner(lambda _publication, _partitions: chosen)
    platform.publisher.publish(Publication("orders", b""))
    platform.publisher.publish_all([Publication("orders", b""), Publication("orders", b"")])
    platform.transfer.run_once()
    assert [event.partition for event in platform.reader.read("orders")] == [7, 7, 7]


@pytest.mark.parametrize("partition", [10, -1, 2.0, None, True, np.bool_(True), 10**30])
def test_a_partitioner_that_names_a_partition_that_is_not_there_publishes_nothing(
    platform: EventSQL, partition: int
) -> None:
    platform.registry.register_topic(Topic("orders", 10))
    platform.publisher.configure_partitioner(lambda _publication, _partitions: partition)
    with pytest.raises(PartitionOutOfRangeError):
        platform.publisher.publish(Publication("orders", b""))
    with pytest.raises(PartitionOutOfRangeError):
        platform.publisher.publish_all([Publication("orders", b"", partition=0), Publication("orders", b"")])
    assert platform.transfer.run_once() == {}
