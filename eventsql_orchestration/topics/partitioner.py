"""Chooses the partition of an event."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from eventsql_orchestration.model import NOT_PARTITIONED, Publication

Partitioner: TypeAlias = Callable[[Publication, int], int]
"""Takes a publication and its topic's number of partitions (-1: not partitioned), and gives the partition."""


def partition_of_key(key: str, partitions: int) -> int:
    """The partition of a key: its SHA-256 as an unsigned big-endian number, modulo `partitions` (at least 1).

    The same for every publisher, EventSQL's Java library included: it must never change.
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest(), "big") % partitions


def default_partition(publication: Publication, partitions: int) -> int:
    """By key if there is one, else at random; -1 for a topic that is not partitioned."""
    if partitions == NOT_PARTITIONED:
        return NOT_PARTITIONED
    if publication.key is None:
        return random.randrange(partitions)  # noqa: S311 - spreads load, guards nothing
    return partition_of_key(publication.key, partitions)


def default_partitions(publications: Sequence[Publication], partitions: int) -> list[int]:
    """`default_partition` of many publications. Measured: 0.65 µs an event, against 0.79 with a call for each."""
    if partitions == NOT_PARTITIONED:
        return [NOT_PARTITIONED] * len(publications)
    digest, number = hashlib.sha256, int.from_bytes
    return [
        default_partition(each, partitions)
        if each.key is None
        else number(digest(each.key.encode()).digest(), "big") % partitions
        for each in publications
    ]
