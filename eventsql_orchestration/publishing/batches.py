"""Batches of publications, encoded for the buffer or for a log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Final, TypeVar

import psycopg

from eventsql_orchestration.errors import DatabaseError, ValidationError
from eventsql_orchestration.model import BLOCKS, Publication, Topic
from eventsql_orchestration.publishing import copy_format
from eventsql_orchestration.publishing.block_format import EncodedBlock, encode_blocks

_T = TypeVar("_T")

STRAIGHT_MOST: Final = 20_000
STRAIGHT_BYTES: Final = 16 * 1024 * 1024
"""A larger batch would hold the topic and memory for too long."""

LEAST_IN_BLOCK: Final = 10
"""The least number of events for each block that a publication puts into the buffer. If there are fewer, the events go
into the buffer one by one, and the transfer makes blocks of them."""

CHUNK_EVENTS: Final = 500
_CHUNK_BYTES: Final = 256 * 1024
_PART_EVENTS: Final = 5_000
"""Number of a batch's events that become blocks at a time: the server stores them while the next events get their
partitions."""


def check_publication(publication: object) -> Publication:
    """Return `publication`, or raise `ValidationError` for anything else."""
    if isinstance(publication, Publication):
        return publication
    raise ValidationError(
        f"publication must be a Publication(topic, value, key=…, metadata=…), not {type(publication).__name__}"
    )


@contextmanager
def refusing_rollback() -> Iterator[None]:
    """Raise `DatabaseError` if the caller's code in the block raises `psycopg.Rollback`.

    A transaction of this package would take the exception for success, although nothing is published.
    """
    try:
        yield
    except psycopg.Rollback as error:
        raise DatabaseError(
            "nothing was published: the publications raised psycopg.Rollback. Raise another error"
        ) from error


def read_ahead(publications: Iterable[Publication]) -> tuple[list[Publication], Iterator[Publication] | None]:
    """The first events, up to one more than the straight path takes, and the rest; None if there is no rest."""
    if type(publications) is list and len(publications) <= STRAIGHT_MOST:
        # The caller's list may change later.
        known = list(publications)
        if set(map(type, known)) <= {Publication} and sum(map(copy_format.size, known)) <= STRAIGHT_BYTES:
            return known, None

    first: list[Publication] = []
    size = 0
    source = iter(publications)
    for publication in source:
        first.append(check_publication(publication))
        size += copy_format.size(publication)
        if len(first) > STRAIGHT_MOST or size > STRAIGHT_BYTES:
            return first, source
    return first, None


def parts_of(publications: Iterable[Publication]) -> Iterator[list[Publication]]:
    """The publications in lists that fit into memory."""
    rest: Iterable[Publication] | None = publications
    while rest is not None:
        part, rest = read_ahead(rest)
        yield part


def by_topic(publications: list[Publication]) -> Iterable[tuple[str, list[Publication]]]:
    """The publications of each topic, in their order."""
    found: defaultdict[str, list[Publication]] = defaultdict(list)
    for publication in publications:
        found[publication.topic].append(publication)
    return found.items()


def for_buffer(topic: Topic, publications: list[Publication], partitions: list[int]) -> Iterator[bytes]:
    """Encode publications of a topic for a COPY into the buffer: as blocks if the topic's log is in blocks and if they
    are enough, else as single events.
    """
    if topic.storage == BLOCKS and len(publications) >= LEAST_IN_BLOCK * len(set(partitions)):
        yield from (block.buffered_row(topic.name) for block in in_blocks(publications, partitions))
        return

    prefix = copy_format.publication_prefix(topic.name)
    rows: list[bytes] = []
    size = 0
    for row in map(copy_format.encode, publications, partitions):
        rows += (prefix, row)
        size += len(row)
        if size > _CHUNK_BYTES:
            yield b"".join(rows)
            rows, size = [], 0
    yield b"".join(rows)


def in_rows(publications: list[Publication], partitions: Iterable[int]) -> Iterator[list[bytes]]:
    """The rows of events for a log in rows, in parts."""
    rows = map(copy_format.encode, publications, partitions)
    return iter(lambda: list(islice(rows, CHUNK_EVENTS)), [])


def in_blocks(publications: list[Publication], partitions: Iterable[int]) -> Iterator[EncodedBlock]:
    """The blocks of events. Partitions are found here, before the topic is held, for the first part.

    Each block is encoded when it is asked for: meanwhile, the server stores the block before.
    """
    left = iter(partitions)
    parts = slices(publications, _PART_EVENTS)
    blocks = chain.from_iterable(encode_blocks(part, islice(left, len(part))) for part in parts)
    return chain([next(blocks)], blocks)


def slices(publications: Sequence[_T], events: int) -> Iterator[Sequence[_T]]:
    return (publications[start : start + events] for start in range(0, len(publications), events))
