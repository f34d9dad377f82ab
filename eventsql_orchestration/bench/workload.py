"""The events of the benchmarks: accounts that were created, about 150 bytes of JSON each."""

from __future__ import annotations

import json
import random
import struct
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import cycle, islice
from typing import Final

from eventsql_orchestration.model import Publication
from eventsql_orchestration.publishing import copy_format
from eventsql_orchestration.topics.partitioner import default_partition

POOL: Final = 50_000
"""Different events, made before the clock starts and published again and again. No figure includes the time to make
them."""

_FIRST: Final = datetime(2025, 6, 13, 17, 20, 20, 296_000, tzinfo=UTC)


def publications(topic: str, number: int = POOL, *, seed: int = 0) -> list[Publication]:
    """Different publications. The same `seed` gives the same publications."""
    source = random.Random(seed)  # noqa: S311 - no secret
    return [_account_created(topic, source, position) for position in range(number)]


def _account_created(topic: str, source: random.Random, position: int) -> Publication:
    account = str(uuid.UUID(int=source.getrandbits(128), version=4))
    name = f"name-{source.getrandbits(48):012x}"
    value = {
        "id": account,
        "name": name,
        "email": f"{name}@email.com",
        "createdAt": (_FIRST + timedelta(microseconds=position)).isoformat(timespec="microseconds"),
    }
    return Publication(topic, json.dumps(value, separators=(",", ":")).encode(), key=account)


def batches(pool: Sequence[Publication], events: int, batch: int) -> Iterator[list[Publication]]:
    """`events` publications of the pool in batches. After its end, the pool starts again."""
    endless = cycle(pool)
    for done in range(0, events, batch):
        yield list(islice(endless, min(batch, events - done)))


def encoded_batches(topic: str, partitions: int, *, events: int, batch: int) -> Iterator[tuple[int, bytes]]:
    """`events` events of `topic` as COPY takes them, in batches with the number of their events.

    Each batch of the pool is encoded once, before the first batch is given out.
    """
    pool = publications(topic, max(batch, min(POOL, events) // batch * batch))
    blocks = [_block(pool[first : first + batch], partitions) for first in range(0, len(pool), batch)]
    rest = events % batch
    last = [(rest, _block(pool[:rest], partitions))] if rest else []
    whole = ((batch, block) for block in islice(cycle(blocks), events // batch))
    return (each for part in (whole, last) for each in part)


def _block(pool: Sequence[Publication], partitions: int) -> bytes:
    name = pool[0].topic.encode()
    prefix = struct.pack(">hi", len(copy_format.BUFFER_COLUMNS), len(name)) + name
    rows = (prefix + copy_format.encode(each, default_partition(each, partitions)) for each in pool)
    return b"".join((copy_format.HEADER, *rows, copy_format.TRAILER))
